"""When replicas that were lost are started again: soon the first time, later each time that it fails at once.

Knows no processes; time is asked of a clock.
"""

from __future__ import annotations

from collections.abc import Callable

FIRST_DELAY = 0.5  # seconds
LONGEST_DELAY = 60.0
STEADY = 60.0  # seconds of service after which a loss is a first one again


class Restarts:
    """The replicas that were ever lost. `clock`: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lives: dict[int, int] = {}
        self._failures: dict[int, int] = {}  # in a row
        self._since: dict[int, float] = {}  # when it last came back
        self._due: dict[int, float] = {}

    def life(self, replica: int) -> int:
        """How often it was lost."""
        return self._lives.get(replica, 0)

    def lost(self, replica: int) -> float:
        """It is gone. Returns the seconds until it is due."""
        now = self._clock()
        self._lives[replica] = self.life(replica) + 1
        since = self._since.pop(replica, None)
        steady = since is not None and now - since >= STEADY
        self._failures[replica] = 1 if steady else self._failures.get(replica, 0) + 1
        delay = min(LONGEST_DELAY, FIRST_DELAY * 2.0 ** min(self._failures[replica] - 1, 16))
        self._due[replica] = now + delay
        return delay

    def succeeded(self, replica: int) -> None:
        """It is back."""
        self._since[replica] = self._clock()

    def wait(self) -> float | None:
        """Seconds until the next one is due; None: none is."""
        return max(0.0, min(self._due.values()) - self._clock()) if self._due else None

    def take_due(self) -> list[int]:
        """The replicas that are to be started now."""
        now = self._clock()
        due = [replica for replica, at in self._due.items() if at <= now]
        for replica in due:
            del self._due[replica]
        return due
