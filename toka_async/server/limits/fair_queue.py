"""One queue for whatever waits for room: FIFO for each owner, owners in turn, batch work behind all others.

Nobody starves. While a request waits for a limit that several owners share, no request that came later, or whose turn
is later, takes from that limit. A request that waits only for its owner's own limit is in nobody else's way. Work is
per event. What a request costs and where it counts is its owner's affair.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

C = TypeVar("C")
C_contra = TypeVar("C_contra", contravariant=True)


class Limit(Protocol[C_contra]):
    """Something that requests count in. Compared by identity."""

    def fits(self, cost: C_contra) -> bool:
        """Whether there is room for so much now."""
        ...

    def add(self, cost: C_contra) -> None:
        """Counts a request, whether it fits or not."""
        ...

    def remove(self, cost: C_contra) -> None:
        """Counts a request no longer."""
        ...


@dataclass(slots=True, eq=False, kw_only=True)
class QueueOwner(Generic[C]):
    """Somebody whose requests wait in order.

    is_behind: its requests let those of all other owners go first. limits: all that its requests count in; the owner
    itself comes first if it is a limit too.
    """

    is_behind: bool = False
    limits: tuple[Limit[C], ...] = ()

    def check_ever(self, cost: C) -> None:
        """Raises the error of a request for which there never will be room."""

    def count_waiting(self, cost: C, change: int) -> None:
        """One more request waits (1), or one no longer (-1)."""


@dataclass(frozen=True, slots=True, eq=False)
class WaitingRequest(Generic[C]):
    """A request for which there is no room yet. The future is done when it is admitted, or can never be."""

    cost: C
    future: asyncio.Future[None]


class FairQueue(Generic[C]):
    """The requests of several owners that wait."""

    def __init__(self) -> None:
        self._waiting: dict[QueueOwner[C], deque[WaitingRequest[C]]] = {}  # in the order of the owners' turns
        # Shared limits that requests wait for: those of owners that are behind no others, and those of the rest.
        self._needed: tuple[set[object], set[object]] = (set(), set())

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def is_open(self, owner: QueueOwner[C]) -> bool:
        """Whether a request that comes now would overtake nobody."""
        return owner not in self._waiting and not self._is_behind_others(owner)

    def can_enter(self, owner: QueueOwner[C], cost: C) -> bool:
        """Whether a request that comes now would not have to wait."""
        return self.is_open(owner) and find_full(owner, cost) is None

    async def enter(self, owner: QueueOwner[C], cost: C) -> None:
        """Takes room for a request, to be given back by `leave`; waits until there is some.

        Raises:
            Exception: as `owner.check_ever`, whose limits may become lower while the request waits.
        """
        if self.can_enter(owner, cost):
            self.take(owner, cost)
            return
        waiting: WaitingRequest[C] = WaitingRequest(cost, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(owner, deque()).append(waiting)
        owner.count_waiting(cost, 1)
        self.admit()  # notes what the request needs, so that nobody who comes later takes that
        try:
            await waiting.future
        except asyncio.CancelledError:
            if waiting.future.cancelled():
                self._waiting[owner].remove(waiting)
                self._drop(owner, cost)
                self.admit()  # it may have been in others' way
            elif waiting.future.exception() is None:
                self.leave(owner, cost)  # it was cancelled in the moment of its admission
            raise

    def take(self, owner: QueueOwner[C], cost: C) -> None:
        """Takes room at once, whoever waits and whether there is room or not."""
        for limit in owner.limits:
            limit.add(cost)

    def leave(self, owner: QueueOwner[C], cost: C) -> None:
        """A request has ended: others may fit now."""
        for limit in owner.limits:
            limit.remove(cost)
        self.admit()

    def admit(self) -> None:
        """Lets in whatever fits; to be called when there may be more room than before."""
        for is_behind, needed in enumerate(self._needed):
            needed.clear()
            turns = deque(owner for owner in self._waiting if owner.is_behind == is_behind)
            while turns:
                owner = turns.popleft()
                if self._admit_first(owner, needed) and owner in self._waiting:
                    turns.append(owner)

    def _admit_first(self, owner: QueueOwner[C], needed: set[object]) -> bool:
        """Whether the first request of the owner waits no longer."""
        line = self._waiting[owner]
        first = line[0]
        if self._is_behind_others(owner) or first.future.cancelled():  # the latter is about to leave
            return False
        try:
            owner.check_ever(first.cost)
        except Exception as error:
            first.future.set_exception(error)
        else:
            full = find_full(owner, first.cost)
            if full is not None:
                if full is not owner:
                    needed.add(full)
                return False
            self.take(owner, first.cost)
            first.future.set_result(None)
        line.popleft()
        self._drop(owner, first.cost)
        if line:
            self._waiting[owner] = self._waiting.pop(owner)  # its next turn is after all others'
        return True

    def _drop(self, owner: QueueOwner[C], cost: C) -> None:
        """One of the owner's requests has left its line."""
        owner.count_waiting(cost, -1)
        if not self._waiting[owner]:
            del self._waiting[owner]

    def _is_behind_others(self, owner: QueueOwner[C]) -> bool:
        """Whether others go first: those that own what the owner counts in, or wait for a limit that it shares."""
        limits: tuple[object, ...] = owner.limits
        return any(
            (limit is not owner and limit in self._waiting)
            or limit in self._needed[0]
            or (owner.is_behind and limit in self._needed[1])
            for limit in limits
        )

    def check(self) -> None:
        """For tests, after every event: whatever waits has a reason to."""
        for owner, line in self._waiting.items():
            assert line
            assert not line[0].future.done()
            assert self._is_behind_others(owner) or find_full(owner, line[0].cost) is not None


def find_full(owner: QueueOwner[C], cost: C) -> object | None:
    """The first of the owner's limits without room for so much now."""
    return next((limit for limit in owner.limits if not limit.fits(cost)), None)
