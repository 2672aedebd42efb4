from __future__ import annotations

import torch

from tests.fakes.states import make_batch
from toka_async.attention.states.pieces import cut_chunks

CPU = torch.device("cpu")


def test_pieces_end_where_states_are_kept() -> None:
    """The second chunk keeps its states after 5 and 12 tokens, the latter at its end."""
    batch = make_batch([3, 1], [(0, 9), (4, 12)], [(1, 5, 2), (1, 12, 0)], CPU)
    cut = cut_chunks(batch, most_tokens=4, first_snapshot=10)
    assert cut.chunks.tolist() == [[0, 3, 0], [3, 4, 4]]
    assert cut.pieces.tolist() == [
        [0, 4, -1], [4, 4, -1], [8, 1, -1], [9, 4, -1], [13, 1, 12], [14, 4, -1], [18, 3, 10],
    ]  # fmt: skip


def test_a_step_without_chunks_has_no_pieces() -> None:
    cut = cut_chunks(make_batch([3, 1], [], [], CPU), 4, 10)
    assert cut.pieces.shape == cut.chunks.shape == (0, 3)
