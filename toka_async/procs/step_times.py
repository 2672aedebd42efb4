"""Measures the scheduler's work for a step in CPU time of its thread, which other processes do not stretch."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import numpy as np

from toka_async.messages import SCHEDULER_STAGES, Stats
from toka_async.scheduler.statistics import percentiles

WINDOW = 4096  # steps in the percentiles


class StepTimes:
    """The newest steps' times. Turns without a completed step count for the next one that completes."""

    def __init__(self, window: int = WINDOW, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._microseconds = np.zeros(window, np.float32)
        self._num_steps = 0
        self._open = 0.0  # seconds since a step completed
        self._stages = dict.fromkeys(SCHEDULER_STAGES, 0.0)
        self._at = 0.0

    def begin(self) -> None:
        self._at = self._clock()

    def lap(self, stage: str) -> None:
        """Add the time since the last call, or the beginning, to a stage."""
        at = self._clock()
        self._stages[stage] += at - self._at
        self._open += at - self._at
        self._at = at

    def end(self, num_steps: int) -> None:
        """End a turn that has completed `num_steps` steps, which share its time."""
        if num_steps:
            places = np.arange(self._num_steps, self._num_steps + num_steps) % self._microseconds.size
            self._microseconds[places] = self._open * 1e6 / num_steps
            self._num_steps += num_steps
            self._open = 0.0

    def fill(self, stats: Stats) -> Stats:
        newest = self._microseconds[: self._num_steps]
        stages = tuple(self._stages.values())
        return msgspec.structs.replace(stats, scheduler_us=percentiles(newest), stage_seconds=stages)
