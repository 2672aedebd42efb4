"""How much memory the bodies of all requests may take together.

All that a body may need is reserved before it is read, so that bodies that are half read never wait for each other. A
body that finds no room waits in a `FairQueue`. This module knows owners and bytes, no HTTP.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from weakref import WeakValueDictionary

from toka_async.server.limits.fair_queue import FairQueue, QueueOwner
from toka_async.server.limits.jobs import OverloadedError


@dataclass(eq=False)
class BodyAccount(QueueOwner[int]):
    """The most bytes that bodies of one key or address may have, or those of all, and the bytes that they have.

    It has no slots because `Bodies` references it weakly: in Python 3.12.3 a slotted dataclass that inherits from
    `Generic` cannot be, not even with `weakref_slot=True` (https://github.com/python/cpython/issues/118033).
    """

    most: int
    num_bytes: int = 0

    def __post_init__(self) -> None:
        self.limits = (self, *self.limits)

    def fits(self, num_bytes: int) -> bool:
        return self.num_bytes + num_bytes <= self.most

    def add(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes

    def remove(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes
        assert self.num_bytes >= 0


class Bodies:
    """The bodies of one server.

    Args:
        most: bytes of all bodies.
        share: bytes of one owner's bodies, at least those of the largest body. The rest of `most` is for others.
        what: the setting that bounds them, for errors.
    """

    def __init__(self, most: int, share: int, what: str = "limits.max_bodies_mb") -> None:
        assert 0 < share <= most
        self._what = what
        self._share = share
        self._total = BodyAccount(most)
        self._queue: FairQueue[int] = FairQueue()
        self._accounts: WeakValueDictionary[str, BodyAccount] = WeakValueDictionary()
        self.num_refused = 0

    @property
    def num_bytes(self) -> int:
        """Bytes that are reserved."""
        return self._total.num_bytes

    @property
    def num_waiting(self) -> int:
        """Bodies that wait for room."""
        return len(self._queue)

    async def reserve(self, owner: str, num_bytes: int, timeout: float) -> Room:
        """Takes room for a body of that owner; waits for it at most `timeout` seconds, 0 for any time.

        Raises:
            OverloadedError: there was no room in that time.
        """
        assert 0 < num_bytes <= self._share
        account = self._accounts.get(owner)
        if account is None:
            account = self._accounts[owner] = BodyAccount(self._share, limits=(self._total,))
        try:
            async with asyncio.timeout(timeout or None):
                await self._queue.enter(account, num_bytes)
        except TimeoutError:
            self.num_refused += 1
            raise OverloadedError(
                f"no room for a body of up to {num_bytes} bytes in {timeout:g} s: {self._what} is "
                f"{self._total.most >> 20} MiB for all bodies at once, {self._share >> 20} MiB for those of one key or "
                "address"
            ) from None
        return Room(self._queue, account, num_bytes)


@dataclass(slots=True, eq=False)
class Room:
    """The reservation of one body. num_bytes: 0 when it is given back."""

    queue: FairQueue[int]
    account: BodyAccount
    num_bytes: int

    def shrink(self, num_bytes: int) -> None:
        """Gives back what the body does not need, as is known now; all of it with 0."""
        assert num_bytes <= self.num_bytes
        given_back, self.num_bytes = self.num_bytes - num_bytes, num_bytes
        if given_back:
            self.queue.leave(self.account, given_back)
