"""Decides which part of a matrix a tensor rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from toka_async.checkpoint.matrix_spec import Units


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
    def runs(self) -> tuple[Share, ...]:
        return (self,)

    @property
    def indices(self) -> slice:
        return slice(self.start, self.start + self.size)


@dataclass(slots=True, frozen=True)
class JoinedShare:
    """A rank's parts of several ranges of rows that are one after the other in a tensor."""

    shares: tuple[Share, ...]

    @property
    def total(self) -> int:
        return sum(share.total for share in self.shares)

    @property
    def is_whole(self) -> bool:
        return all(share.is_whole for share in self.shares)

    @property
    def runs(self) -> tuple[Share, ...]:
        """Returns each part as one of the whole tensor."""
        if self.is_whole:
            return (whole_of(self.total),)
        starts = accumulate((share.total for share in self.shares), initial=0)
        return tuple(
            Share(self.total, start + share.start, share.size)
            for start, share in zip(starts, self.shares, strict=False)
        )

    def divided(self, num: int) -> JoinedShare:
        """See `Share.divided`."""
        return JoinedShare(tuple(share.divided(num) for share in self.shares))


def whole_of(total: int) -> Share:
    """Returns the part that is all of it."""
    return Share(total, 0, total)


def share_of(total: int, place: Place) -> Share:
    """Returns this rank's equal part of `total`, a multiple of the ranks."""
    assert total % place.size == 0, f"{total} cannot be split over {place.size} ranks"
    size = total // place.size
    return Share(total, place.rank * size, size)


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
