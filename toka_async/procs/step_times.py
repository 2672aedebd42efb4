"""How long the scheduler is busy for a step: CPU time of its thread, so that a crowded machine does not count.

Knows nothing of what is done in that time.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import numpy as np

from toka_async.messages import SCHEDULER_STAGES, Stats
from toka_async.scheduler.statistics import percentiles

WINDOW = 4096  # steps that percentiles are of


class StepTimes:
    """The newest steps' times. What turns without a completed step take counts for the next one that completes."""

    def __init__(self, window: int = WINDOW, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._microseconds = np.zeros(window, np.float32)
        self._num_steps = 0
        self._open = 0.0  # seconds since a step completed
        self._stages = dict.fromkeys(SCHEDULER_STAGES, 0.0)
        self._at = 0.0

    def begin(self) -> None:
        """A turn begins."""
        self._at = self._clock()

    def lap(self, stage: str) -> None:
        """What was done since the last call, or the beginning, was this stage."""
        at = self._clock()
        self._stages[stage] += at - self._at
        self._open += at - self._at
        self._at = at

    def end(self, num_steps: int) -> None:
        """The turn has completed `num_steps` steps, which share its time."""
        if num_steps:
            places = np.arange(self._num_steps, self._num_steps + num_steps) % self._microseconds.size
            self._microseconds[places] = self._open * 1e6 / num_steps
            self._num_steps += num_steps
            self._open = 0.0

    def fill(self, stats: Stats) -> Stats:
        """The message with the times."""
        newest = self._microseconds[: self._num_steps]
        stages = tuple(self._stages.values())
        return msgspec.structs.replace(stats, scheduler_us=percentiles(newest), stage_seconds=stages)
