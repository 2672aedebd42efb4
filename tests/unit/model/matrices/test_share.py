from __future__ import annotations

import pytest

from tests.drivers.thread_ranks import run_ranks
from toka_async.checkpoint.matrix_spec import Units
from toka_async.model.matrices.share import Share, padded_share_of, share_of, share_units, whole_of


def test_shares_cover_the_total() -> None:
    assert run_ranks(3, lambda comm: share_of(12, comm)) == [Share(12, 0, 4), Share(12, 4, 4), Share(12, 8, 4)]
    with pytest.raises(AssertionError, match="13 cannot be split over 3 ranks"):
        run_ranks(3, lambda comm: share_of(13, comm))


def test_fewer_units_than_ranks_are_repeated() -> None:
    assert run_ranks(2, lambda comm: share_units(Units(4, 8), comm)) == [Share(32, 0, 16), Share(32, 16, 16)]
    assert [share.start for share in run_ranks(4, lambda comm: share_units(Units(2, 8), comm))] == [0, 0, 8, 8]
    with pytest.raises(AssertionError, match="2 units cannot be repeated over 3 ranks"):
        run_ranks(3, lambda comm: share_units(Units(2, 8), comm))


def test_the_last_ranks_of_a_padded_total_may_have_less() -> None:
    assert run_ranks(4, lambda comm: padded_share_of(9, comm)) == [
        (Share(9, 0, 3), 3), (Share(9, 3, 3), 3), (Share(9, 6, 3), 3), (Share(9, 9, 0), 3),
    ]  # fmt: skip


def test_what_a_share_covers() -> None:
    assert whole_of(7).is_whole
    assert not Share(7, 0, 6).is_whole
    assert list(range(7))[Share(7, 2, 3).indices] == [2, 3, 4]


def test_a_share_of_blocks() -> None:
    assert Share(512, 128, 256).divided(128) == Share(4, 1, 2)
    assert Share(300, 256, 44).divided(128) == Share(3, 2, 1)
