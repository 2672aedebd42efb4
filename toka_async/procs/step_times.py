"""How long the scheduler is busy for a step: CPU time of its thread, so that a crowded machine does not count.

Knows nothing of what is done in that time.
"""

from __future__ import annotations

import msgspec
import numpy as np

from toka_async.messages import Stats

WINDOW = 4096  # steps that percentiles are of
PERCENTILES = (50, 99, 100)


class StepTimes:
    """The newest steps' times. What turns without a completed step take counts for the next one that completes."""

    def __init__(self, window: int = WINDOW) -> None:
        self._microseconds = np.zeros(window, np.float32)
        self._num_steps = 0
        self._open = 0.0  # seconds since a step completed

    def add(self, seconds: float, num_steps: int) -> None:
        """A turn that completed `num_steps` steps, which share its time."""
        self._open += seconds
        if num_steps:
            places = np.arange(self._num_steps, self._num_steps + num_steps) % self._microseconds.size
            self._microseconds[places] = self._open * 1e6 / num_steps
            self._num_steps += num_steps
            self._open = 0.0

    def fill(self, stats: Stats) -> Stats:
        """The message with the percentiles."""
        newest = self._microseconds[: self._num_steps]
        if not newest.size:
            return stats
        values = np.percentile(newest, PERCENTILES).round(1).tolist()
        return msgspec.structs.replace(stats, scheduler_us=tuple(values))
