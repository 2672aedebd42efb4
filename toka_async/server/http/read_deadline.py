"""How long a part of a request, its header or its body, may take to arrive. Knows bytes and seconds only."""

from __future__ import annotations

from dataclasses import dataclass

LEAST_RATE = 16384  # bytes a second at which a part may take as long as it is long


@dataclass(slots=True)
class Arrival:
    """The part that arrives now.

    timeout: seconds that it may take, and one more for each LEAST_RATE bytes; 0 for any. since: when it began; time in
    which it could not arrive does not count. paused: since when it cannot.
    """

    timeout: float
    since: float = 0.0
    num_bytes: int = 0
    paused: float | None = None

    def begin(self, now: float) -> None:
        """Another part is awaited."""
        self.since, self.num_bytes = now, 0
        if self.paused is not None:
            self.paused = now

    def pause(self, now: float) -> None:
        """It is the other end that lets nothing arrive."""
        if self.paused is None:
            self.paused = now

    def resume(self, now: float) -> None:
        """It can arrive again."""
        if self.paused is not None:
            self.since += now - self.paused
            self.paused = None

    @property
    def deadline(self) -> float:
        return self.since + self.timeout + self.num_bytes / LEAST_RATE
