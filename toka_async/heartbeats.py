"""Decides which children are asked for a sign of life, and which have not answered for too long.

Counts unanswered questions, not seconds: when the parent itself was stopped (a suspended machine, a debugger), no child
is blamed for that time. Knows no processes; the time comes from a clock.
"""

from __future__ import annotations

from collections.abc import Callable

NUM_BEATS = 4  # questions within the timeout
SILENT_BEATS = 2  # unanswered questions after which a child counts as silent, though not yet as hung


class Heartbeats:
    """Signs of life, by name.

    Args:
        timeout: seconds without an answer after which a child hangs; 0: no child is asked.
        clock: seconds, monotonic.
    """

    def __init__(self, timeout: float, clock: Callable[[], float]) -> None:
        self._interval = timeout / NUM_BEATS
        self._clock = clock
        self._next = clock() + self._interval
        self._unanswered: dict[str, int] = {}

    def time_until_due(self) -> float | None:
        """Seconds until the next questions are due; None: never."""
        return max(0.0, self._next - self._clock()) if self._interval else None

    def take_due(self) -> bool:
        """Whether questions are due now; after a long pause they are due once."""
        if not self._interval or self._clock() < self._next:
            return False
        self._next = self._clock() + self._interval
        return True

    def hangs(self, name: str, patience: int = 1) -> bool:
        """Whether the child left so many questions unanswered that it hangs; `patience` multiplies their number."""
        return self._unanswered.get(name, 0) >= NUM_BEATS * patience

    def note_asked(self, name: str) -> None:
        self._unanswered[name] = self._unanswered.get(name, 0) + 1

    def note_answered(self, name: str) -> None:
        if name in self._unanswered:
            self._unanswered[name] = 0

    def forget(self, name: str) -> None:
        self._unanswered.pop(name, None)

    def find_silent(self) -> tuple[str, ...]:
        """Find those that have not answered lately, sorted by name."""
        return tuple(sorted(name for name, count in self._unanswered.items() if count >= SILENT_BEATS))
