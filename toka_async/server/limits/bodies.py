"""How much memory the bodies of all requests may take together, and who waits for some.

All that a body may need is reserved before it is read, so that whoever has room gets to its end: bodies that are half
there never wait for each other. In order within an owner, in turn between owners; nobody is overtaken but by owners
that have less. Work per event. Knows owners and bytes, no HTTP.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from dataclasses import dataclass

from toka_async.server.limits.jobs import OverloadedError


@dataclass(frozen=True, slots=True, eq=False)
class WaitingBody:
    """A body that there is no room for yet."""

    num_bytes: int
    future: asyncio.Future[None]


class Bodies:
    """Of one server.

    Args:
        most: bytes of all bodies.
        share: bytes of one owner's, at least those of the largest body. What is left of `most` is for others.
        what: the setting that bounds them, for errors.
    """

    def __init__(self, most: int, share: int, what: str = "limits.max_bodies_mb") -> None:
        assert 0 < share <= most
        self._what = what
        self._most = most
        self._share = share
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[WaitingBody]] = {}  # in the order of their turns
        self.num_bytes = 0
        self.num_waiting = 0
        self.num_refused = 0

    async def reserve(self, owner: str, num_bytes: int, timeout: float) -> Room:
        """Takes room, for the caller to give back; waits for it `timeout` seconds at most, 0 for any.

        Raises:
            OverloadedError: there was none in that time.
        """
        assert 0 < num_bytes <= self._share
        waiting = WaitingBody(num_bytes, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(owner, deque()).append(waiting)
        self.num_waiting += 1
        self._let_in()
        if not waiting.future.done():
            try:
                async with asyncio.timeout(timeout or None):
                    await self._wait(owner, waiting)
            except TimeoutError:
                self.num_refused += 1
                raise OverloadedError(self._is_full(num_bytes, timeout)) from None
        return Room(self, owner, num_bytes)

    async def _wait(self, owner: str, waiting: WaitingBody) -> None:
        try:
            await waiting.future
        except asyncio.CancelledError:
            if waiting.future.cancelled():
                self._waiting[owner].remove(waiting)
                self._leave(owner)
                self._let_in()  # it may have been in the way
            else:  # it had got its room
                self.give_back(owner, waiting.num_bytes)
            raise

    def give_back(self, owner: str, num_bytes: int) -> None:
        """So much is not needed any more."""
        self.num_bytes -= num_bytes
        self._held[owner] -= num_bytes
        assert self._held[owner] >= 0, owner
        if not self._held[owner]:
            del self._held[owner]
        self._let_in()

    def _let_in(self) -> None:
        """Whoever fits enters, each owner one body a turn."""
        turns = deque(self._waiting)
        while turns:
            owner = turns.popleft()
            first = self._waiting[owner][0]
            if first.future.cancelled():  # it is about to leave, and comes here again
                return
            if self._held[owner] + first.num_bytes > self._share:
                continue
            if self.num_bytes + first.num_bytes > self._most:
                return
            self._enter(owner, first)
            if owner in self._waiting:
                turns.append(owner)

    def _enter(self, owner: str, first: WaitingBody) -> None:
        self.num_bytes += first.num_bytes
        self._held[owner] += first.num_bytes
        line = self._waiting[owner]
        line.popleft()
        self._leave(owner)
        if line:
            self._waiting[owner] = self._waiting.pop(owner)  # its next turn is after all others'
        first.future.set_result(None)

    def _leave(self, owner: str) -> None:
        """One of the owner's waits no more."""
        self.num_waiting -= 1
        if not self._waiting[owner]:
            del self._waiting[owner]

    def _is_full(self, num_bytes: int, timeout: float) -> str:
        return (
            f"no room for a body of up to {num_bytes} bytes in {timeout:g} s: {self._what} is "
            f"{self._most >> 20} MiB for all bodies at once, {self._share >> 20} MiB for those of one key or address"
        )

    def check(self) -> None:
        """For tests, after every event: whoever waits has a reason to, and is counted."""
        assert self.num_bytes == sum(self._held.values()) <= self._most
        assert max(self._held.values(), default=0) <= self._share
        num_waiting = self.num_waiting
        assert num_waiting == sum(map(len, self._waiting.values()))
        self._let_in()
        assert self.num_waiting == num_waiting


@dataclass(slots=True, eq=False)
class Room:
    """What one body has. num_bytes: 0 when it is given back."""

    bodies: Bodies
    owner: str
    num_bytes: int

    def shrink(self, num_bytes: int) -> None:
        """The body needs no more than that, as is known now."""
        assert num_bytes <= self.num_bytes
        given_back, self.num_bytes = self.num_bytes - num_bytes, num_bytes
        if given_back:
            self.bodies.give_back(self.owner, given_back)
