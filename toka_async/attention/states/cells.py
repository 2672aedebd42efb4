"""What kernels of recurrent layers read of a step's chunks, in one array, so that one copy brings it to the device."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
from torch import Tensor

from toka_async.arrays import Int32
from toka_async.attention.base import ChunkStates
from toka_async.attention.states.pieces import ChunkPieces
from toka_async.kernels.delta.layer import Programs, StepChunks


class ChunkCells:
    """Cells for a step of `num_tokens` tokens with up to `num_pieces` pieces of up to `num_chunks` chunks."""

    def __init__(self, num_tokens: int, num_pieces: int, num_chunks: int) -> None:
        self.num_tokens, self.num_pieces, self.num_chunks = num_tokens, num_pieces, num_chunks
        sizes = (4, 3 * num_pieces, 3 * num_chunks, num_tokens, num_tokens)
        # Parts begin at 16 bytes, so that kernels see one alignment only.
        self._ends = [*accumulate((-(-size // 4) * 4 for size in sizes), initial=0)]
        self._parts = [slice(start, start + size) for start, size in zip(self._ends, sizes, strict=False)]

    @property
    def count(self) -> int:
        return self._ends[-1]

    def fill(
        self, cells: Int32, cut: ChunkPieces, states: ChunkStates, first: int, lengths: Int32, programs: Programs
    ) -> None:
        """Fills cells, all zeros, with a step whose chunks begin at the token `first`, and who takes them."""
        counts, pieces, chunks, slots, offsets = (cells[part] for part in self._parts)
        counts[:] = len(cut.pieces), len(cut.chunks), programs.pieces, programs.readers
        pieces[: cut.pieces.size] = cut.pieces.ravel()
        chunks[: cut.chunks.size] = cut.chunks.ravel()
        of_chunks = slice(first, first + int(lengths.sum()))
        slots[of_chunks] = np.repeat(states.slots, lengths)
        offsets[of_chunks] = np.arange(1, lengths.sum() + 1) - np.repeat(np.cumsum(lengths) - lengths, lengths)

    def read(self, cells: Tensor, programs: Programs) -> StepChunks:
        """Returns what cells on the device describe. programs: to be started, at least those that take part."""
        counts, pieces, chunks, slots, offsets = (cells[part] for part in self._parts)
        return StepChunks(counts, pieces, chunks, slots, offsets, programs)
