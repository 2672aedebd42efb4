"""Decides when lost replicas are restarted: soon at first, later after repeated failures. Knows no processes."""

from __future__ import annotations

from collections.abc import Callable

FIRST_DELAY = 0.5  # seconds
LONGEST_DELAY = 60.0
STEADY = 60.0  # seconds of service after which the next loss counts as the first


class Restarts:
    """The replicas that were ever lost. `clock`: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lives: dict[int, int] = {}
        self._failures: dict[int, int] = {}  # in a row
        self._since: dict[int, float] = {}  # time of the last successful start
        self._due: dict[int, float] = {}

    def life(self, replica: int) -> int:
        """How often the replica was lost."""
        return self._lives.get(replica, 0)

    def note_lost(self, replica: int) -> float:
        """Schedule a restart; returns the seconds until it is due."""
        now = self._clock()
        self._lives[replica] = self.life(replica) + 1
        since = self._since.pop(replica, None)
        steady = since is not None and now - since >= STEADY
        self._failures[replica] = 1 if steady else self._failures.get(replica, 0) + 1
        delay = min(LONGEST_DELAY, FIRST_DELAY * 2.0 ** min(self._failures[replica] - 1, 16))
        self._due[replica] = now + delay
        return delay

    def note_success(self, replica: int) -> None:
        self._since[replica] = self._clock()

    def time_until_due(self) -> float | None:
        """Seconds until the next restart is due; None: there is none."""
        return max(0.0, min(self._due.values()) - self._clock()) if self._due else None

    def take_due(self) -> list[int]:
        now = self._clock()
        due = [replica for replica, at in self._due.items() if at <= now]
        for replica in due:
            del self._due[replica]
        return due
