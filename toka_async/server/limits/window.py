"""How much batch work is in the engine at once: enough that it never waits for more, and no more than that.

This module knows counts only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from toka_async.server.limits.account import Cost

MIN_WAITING = 64  # sequences in the schedulers' queues, so that rows that end are followed by others


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The schedulers' report. rows: sequences that can run at once. running, waiting: sequences of all clients."""

    rows: int
    running: int = 0
    waiting: int = 0


def choose_size(load: EngineLoad, in_flight: int, limit: int) -> int:
    """Chooses how many samples of batches may be in the engine, given that `in_flight` are.

    A quarter of what runs is to wait behind it. So the number falls when others fill the queues, and grows when these
    run low. Free rows are filled too, but the number at most doubles at a time: where the cache holds fewer sequences
    than there are rows, more would only wait. It is at most twice what can run, and `limit`.
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
    """The limit on samples of batches in the engine, which follows the schedulers' queues.

    Args:
        limit: the most samples, whatever the engine can hold.
        on_room: called when there may be more room.

    Attributes:
        size: samples that may be in the engine; 0 while it takes nothing.
        in_flight: samples that are.
    """

    def __init__(self, limit: int, on_room: Callable[[], None]) -> None:
        self.size = 0
        self.in_flight = 0
        self._limit = limit
        self._on_room = on_room

    def report(self, load: EngineLoad) -> None:
        """The engine's state has changed; no rows mean that it takes nothing."""
        self.size = choose_size(load, self.in_flight, self._limit)
        self._on_room()

    def close(self) -> None:
        """Lets nothing in until the next report: the engine has refused what there seemed to be room for."""
        self.size = 0

    def fits(self, _cost: Cost) -> bool:
        """Whether there is some room: a line may need more than there is, or the largest would wait for ever."""
        return self.in_flight < self.size

    def add(self, cost: Cost) -> None:
        self.in_flight += cost.samples

    def remove(self, cost: Cost) -> None:
        self.in_flight -= cost.samples
        assert self.in_flight >= 0
