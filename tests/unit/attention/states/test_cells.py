from __future__ import annotations

import numpy as np
import torch

from toka_async.attention.base import ChunkStates
from toka_async.attention.states.cells import ChunkCells
from toka_async.attention.states.pieces import cut_chunks
from toka_async.kernels.delta.layer import Programs


def test_cells_describe_chunks_behind_decoding_rows() -> None:
    """A graph's cells have room for more, which stays zeros: tokens in no chunk have no place in one."""
    lengths, states = np.asarray([3, 2], np.int32), ChunkStates(np.asarray([7, 4], np.int32), ((0, 1, 2),))
    layout = ChunkCells(num_tokens=9, num_pieces=9, num_chunks=4)
    cells = np.zeros(layout.count, np.int32)
    layout.fill(cells, cut_chunks(lengths, states, 2, 64, 20), states, 2, lengths, Programs(4, 3, 1))
    read = layout.read(torch.from_numpy(cells), Programs(5, 3, 1))
    assert read.counts.tolist() == [3, 2, 4, 1]
    assert read.pieces.view(9, 3)[:4].tolist() == [[2, 1, 22], [3, 2, -1], [5, 2, -1], [0, 0, 0]]
    assert read.chunks.view(4, 3).tolist() == [[0, 2, 7], [2, 1, 4], [0, 0, 0], [0, 0, 0]]
    assert read.slots.tolist() == [0, 0, 7, 7, 7, 4, 4, 0, 0]
    assert read.offsets.tolist() == [0, 0, 1, 2, 3, 1, 2, 0, 0]
    assert read.programs == Programs(5, 3, 1)
    assert all(part.storage_offset() % 4 == 0 for part in (read.pieces, read.chunks, read.slots, read.offsets))
