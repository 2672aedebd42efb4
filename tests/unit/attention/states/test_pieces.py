from __future__ import annotations

import numpy as np

from toka_async.attention.base import ChunkStates
from toka_async.attention.states.pieces import cut_chunks


def test_pieces_end_where_states_are_kept() -> None:
    """The second chunk keeps its states after 5 and 12 tokens, the latter at its end."""
    states = ChunkStates(np.asarray([0, 4], np.int32), ((1, 5, 2), (1, 12, 0)))
    cut = cut_chunks(np.asarray([9, 12], np.int32), states, first=2, most_tokens=4, first_snapshot=10)
    assert cut.chunks.tolist() == [[0, 3, 0], [3, 4, 4]]
    assert cut.pieces.tolist() == [
        [2, 4, -1], [6, 4, -1], [10, 1, -1], [11, 4, -1], [15, 1, 12], [16, 4, -1], [20, 3, 10],
    ]  # fmt: skip


def test_a_step_without_chunks_has_no_pieces() -> None:
    none = np.zeros(0, np.int32)
    cut = cut_chunks(none, ChunkStates(none), 2, 4, 10)
    assert cut.pieces.shape == cut.chunks.shape == (0, 3)
