"""How much batch work is in the engine at once: enough that it never waits for more, and no more than that.

Knows counts only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from toka_async.fair_queue import FairQueue

MIN_WAITING = 64  # sequences in the schedulers' queues, so that rows that end are followed by others


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What the schedulers report. rows: sequences that can run at once. running, waiting: those of all clients."""

    rows: int
    running: int = 0
    waiting: int = 0


def next_size(load: EngineLoad, in_flight: int, limit: int) -> int:
    """The samples of batches that may be in the engine, given that `in_flight` are.

    So many that a quarter of what runs waits behind it: fewer when others fill the queues, more when these run low.
    Free rows are filled then too, but no faster than by doubling: where the cache holds fewer than there are rows,
    more would only wait. At most twice what can run, and `limit`.
    """
    if not load.rows:
        return 0
    wanted = max(MIN_WAITING, load.running // 4)
    size = in_flight + wanted - load.waiting
    if load.waiting <= wanted:
        free = max(0, load.rows - load.running)
        size += min(free, in_flight) if in_flight else free
    return max(1, min(size, 2 * load.rows + MIN_WAITING, limit))


class Window:
    """Samples in the engine, and the lines that wait for room: in order for each owner, owners in turn.

    Args:
        limit: of samples, whatever the engine can hold.
    """

    def __init__(self, limit: int) -> None:
        self.size = 0
        self.in_flight = 0
        self._limit = limit
        self._waiting: FairQueue[tuple[asyncio.Future[None], int]] = FairQueue()
        self._retrying: list[asyncio.Future[None]] = []

    def report(self, load: EngineLoad) -> None:
        """The engine's state has changed; no rows mean that it takes nothing."""
        self.size = next_size(load, self.in_flight, self._limit)
        self._wake()
        if self.size:
            retrying, self._retrying = self._retrying, []
            for future in retrying:
                if not future.done():
                    future.set_result(None)

    async def enter(self, owner: str, cost: int) -> None:
        """Waits until there is some room: a line may need more than there is, or the largest would wait for ever."""
        if not self._waiting and self.in_flight < self.size:
            self.in_flight += cost
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.put(owner, (future, cost))
        try:
            await future
        except asyncio.CancelledError:
            if not future.cancelled():  # it had entered
                self.leave(cost)
            raise

    def leave(self, cost: int) -> None:
        self.in_flight -= cost
        assert self.in_flight >= 0
        self._wake()

    @contextmanager
    def paused(self, cost: int) -> Iterator[None]:
        """Who has entered waits for something else: meanwhile others can have its room. It gets it back at once."""
        self.leave(cost)
        try:
            yield
        finally:
            self.in_flight += cost

    async def changed(self) -> None:
        """Waits for the next report of an engine that takes requests."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._retrying.append(future)
        await future

    def _wake(self) -> None:
        while self._waiting and self.in_flight < self.size:
            future, cost = self._waiting.take()
            if not future.done():
                self.in_flight += cost
                future.set_result(None)
