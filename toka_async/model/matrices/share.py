"""Decides which part of a matrix a tensor rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from toka_async.checkpoint.matrix_spec import PackedUnits, Units


class Place(Protocol):
    """A rank among those that hold one model together."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...


@dataclass(slots=True, frozen=True)
class Share:
    """A rank's contiguous part of `total` rows, columns or heads."""

    total: int
    start: int
    size: int

    def times(self, num: int) -> Share:
        """Returns the part when each item is `num` rows."""
        return Share(self.total * num, self.start * num, self.size * num)

    def divided(self, num: int) -> Share:
        """Returns the part when `num` rows are one item; the part has whole items, the last of all may be smaller."""
        assert self.start % num == 0
        return Share(-(-self.total // num), self.start // num, -(-self.size // num))

    @property
    def is_whole(self) -> bool:
        return self.size == self.total

    @property
    def indices(self) -> slice:
        return slice(self.start, self.start + self.size)

    @property
    def pieces(self) -> tuple[Share, ...]:
        return (self,)


@dataclass(slots=True, frozen=True)
class PiecedShare:
    """A rank's part of `total` rows in several pieces, one after the other in this order."""

    pieces: tuple[Share, ...]

    @property
    def total(self) -> int:
        return self.pieces[0].total

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)

    def divided(self, num: int) -> PiecedShare:
        """See `Share.divided`, for each piece."""
        return PiecedShare(tuple(piece.divided(num) for piece in self.pieces))

    @property
    def is_whole(self) -> bool:
        """Whether it is all rows in their order, which has no pieces."""
        return False


RowShare = Share | PiecedShare


def join_shares(shares: Sequence[Share]) -> RowShare:
    """Joins parts of the same rows, in this order; those that follow each other are one piece."""
    pieces: list[Share] = []
    for share in shares:
        if pieces and pieces[-1].start + pieces[-1].size == share.start:
            share = Share(share.total, pieces[-1].start, pieces.pop().size + share.size)
        pieces.append(share)
    return pieces[0] if len(pieces) == 1 else PiecedShare(tuple(pieces))


def whole_of(total: int) -> Share:
    """Returns the part that is all of it."""
    return Share(total, 0, total)


def share_of(total: int, place: Place) -> Share:
    """Returns this rank's equal part of `total`, a multiple of the ranks."""
    assert total % place.size == 0, f"{total} cannot be split over {place.size} ranks"
    size = total // place.size
    return Share(total, place.rank * size, size)


def share_rows(units: Units | PackedUnits, place: Place) -> RowShare:
    """Returns the rows of this rank's equal part of the units; see `share_units`."""
    if isinstance(units, Units):
        return share_units(units, place)
    own = share_of(units.count, place)
    return join_shares([Share(units.total, *each) for each in units.list_places(own.start, own.size)])


def share_units(units: Units, place: Place) -> Share:
    """Returns the values of this rank's equal part of the units; of fewer units than ranks, the one that it needs."""
    if units.count >= place.size:
        return share_of(units.count, place).times(units.size)
    assert place.size % units.count == 0, f"{units.count} units cannot be repeated over {place.size} ranks"
    return Share(units.count, place.rank * units.count // place.size, 1).times(units.size)


def padded_share_of(total: int, place: Place) -> tuple[Share, int]:
    """Returns this rank's part of any `total` rows, and the rows per rank; the last ranks may have unused ones."""
    rows = -(-total // place.size)
    start = min(place.rank * rows, total)
    return Share(total, start, min(rows, total - start)), rows
