"""Cuts a step's chunks of prompts into the pieces that layers with a recurrent state compute one after the other.

A piece ends where a state is to be kept, and where it has as many tokens as are computed at once. Knows no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from toka_async.arrays import Int32
from toka_async.attention.base import ChunkStates


@dataclass(slots=True, frozen=True)
class ChunkPieces:
    """The pieces of all chunks, in order.

    pieces: int32 [p, 3]: its first token in the step, its tokens, and the number of the state in which the one behind
    it is kept, or -1. chunks: int32 [k, 3]: its first piece, its pieces, and its slot.
    """

    pieces: Int32
    chunks: Int32


def cut_chunks(lengths: Int32, states: ChunkStates, first: int, most_tokens: int, first_snapshot: int) -> ChunkPieces:
    """Cuts chunks of these lengths into pieces of at most so many tokens.

    first: the first chunk's first token in the step. first_snapshot: the number of its state.
    """
    pieces: list[tuple[int, int, int]] = []
    chunks: list[tuple[int, int, int]] = []
    for number, (slot, length) in enumerate(zip(states.slots.tolist(), lengths.tolist(), strict=True)):
        kept = {end: first_snapshot + kept for chunk, end, kept in states.saves if chunk == number}
        num_before, start = len(pieces), 0
        for stop in sorted({*kept, length}):
            while start < stop:
                end = min(start + most_tokens, stop)
                pieces.append((first + start, end - start, kept.get(end, -1)))
                start = end
        chunks.append((num_before, len(pieces) - num_before, slot))
        first += length
    return ChunkPieces(np.asarray(pieces, np.int32).reshape(-1, 3), np.asarray(chunks, np.int32).reshape(-1, 3))
