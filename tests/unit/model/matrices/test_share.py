from __future__ import annotations

import pytest

from tests.drivers.thread_ranks import run_ranks
from toka_async.checkpoint.matrix_spec import PackedUnits, Units
from toka_async.model.comm import LocalComm
from toka_async.model.matrices.share import (
    PiecedShare,
    Share,
    padded_share_of,
    share_of,
    share_rows,
    share_units,
    whole_of,
)


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


def test_packed_units_lie_by_kind_on_a_rank() -> None:
    """Two units of a query of 2 values and a gate of 1, as a checkpoint has them by unit: q q g q q g."""
    by_unit = PackedUnits(2, (2, 1), by_unit=True)
    whole = share_rows(by_unit, LocalComm())
    assert [list(range(6))[piece.indices] for piece in whole.pieces] == [[0, 1], [3, 4], [2], [5]]
    gates_first = share_rows(PackedUnits(2, (2, 1), by_unit=True, order=(1, 0)), LocalComm())
    assert [list(range(6))[piece.indices] for piece in gates_first.pieces] == [[2], [5], [0, 1], [3, 4]]
    assert share_rows(PackedUnits(2, (2, 1), by_unit=False), LocalComm()) == whole_of(6)
    parts = run_ranks(2, lambda comm: share_rows(PackedUnits(2, (2, 1), by_unit=False), comm))
    assert parts == [PiecedShare((Share(6, 0, 2), Share(6, 4, 1))), PiecedShare((Share(6, 2, 2), Share(6, 5, 1)))]
    assert [part.size for part in parts] == [3, 3]


def test_pieces_divide_into_blocks() -> None:
    pieces = PiecedShare((Share(512, 128, 128), Share(512, 384, 128)))
    assert pieces.divided(128) == PiecedShare((Share(4, 1, 1), Share(4, 3, 1)))
    assert PackedUnits(2, (128, 256), by_unit=True).has_whole(128)
    assert not PackedUnits(2, (128, 64), by_unit=True).has_whole(128)
    assert PackedUnits(2, (128, 64), by_unit=False).has_whole(128)
