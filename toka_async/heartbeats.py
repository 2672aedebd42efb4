"""Who is asked for a sign of life, and who has not given one for too long.

Counted in questions that stay without an answer, not in seconds: when the one who asks was stopped itself (a suspended
machine, a debugger), nobody else is blamed for the time that has passed. Knows no processes; time is asked of a clock.
"""

from __future__ import annotations

from collections.abc import Callable

NUM_BEATS = 4  # questions in the time in which there must be an answer
SILENT_BEATS = 2  # unanswered ones after which somebody counts as silent, though not yet as hung


class Heartbeats:
    """Signs of life, by name.

    Args:
        timeout: seconds without an answer after which somebody hangs; 0: nobody is asked.
        clock: seconds, monotonic.
    """

    def __init__(self, timeout: float, clock: Callable[[], float]) -> None:
        self._interval = timeout / NUM_BEATS
        self._clock = clock
        self._next = clock() + self._interval
        self._unanswered: dict[str, int] = {}

    def wait(self) -> float | None:
        """Seconds until the next questions are due; None: they never are."""
        return max(0.0, self._next - self._clock()) if self._interval else None

    def take_due(self) -> bool:
        """Is it time to ask? Those who were not asked for a while are asked once."""
        if not self._interval or self._clock() < self._next:
            return False
        self._next = self._clock() + self._interval
        return True

    def hangs(self, name: str, patience: int = 1) -> bool:
        """Has it been asked so often without an answer that it counts as hung? `patience`: so many times as long."""
        return self._unanswered.get(name, 0) >= NUM_BEATS * patience

    def asked(self, name: str) -> None:
        self._unanswered[name] = self._unanswered.get(name, 0) + 1

    def answered(self, name: str) -> None:
        if name in self._unanswered:
            self._unanswered[name] = 0

    def forget(self, name: str) -> None:
        """It is gone."""
        self._unanswered.pop(name, None)

    def silent(self) -> tuple[str, ...]:
        """Those who have not answered lately, in order of their names."""
        return tuple(sorted(name for name, count in self._unanswered.items() if count >= SILENT_BEATS))
