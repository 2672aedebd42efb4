"""The Stats message: when it is due, and what it says."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from toka_async.messages import Stats, StepDone
from toka_async.scheduler.builder import StepBuilder
from toka_async.scheduler.depth import StepDepth
from toka_async.scheduler.policy import Admission
from toka_async.scheduler.preemption import Preemption
from toka_async.scheduler.running import RunningSet

PERCENTILES = (50, 99, 100)
NO_TIMES = (0.0, 0.0, 0.0)
INTERVAL = 0.25  # seconds between two messages while work goes on


class StatsSource:
    """Counts what the core sees, reads the rest off the components."""

    def __init__(
        self, running: RunningSet, builder: StepBuilder, preemption: Preemption, depth: StepDepth, admission: Admission
    ) -> None:
        self._running = running
        self._builder = builder
        self._preemption = preemption
        self._depth = depth
        self._admission = admission
        self._sent: Stats | None = None
        self._sent_at = float("-inf")
        self.num_open = 0  # samples of open requests that have not ended
        self.generated_tokens = 0
        self.wasted_tokens = 0
        self.num_steps = 0
        self.step_seconds = 0.0
        self.device_idle_seconds = 0.0
        self.num_compiles = 0
        self.stages: dict[int, tuple[float, float, float]] = {}  # of a pipeline: see `Stats.pipeline`

    def stepped(self, done: StepDone, was_queued: bool) -> None:
        """A step came back; it was queued, or not, when the one before it did."""
        self.num_steps += 1
        self.step_seconds += done.seconds
        self.device_idle_seconds += done.waited if was_queued else 0.0
        self.num_compiles = done.num_compiles

    def computed(self, num_tokens: int, num_wasted: int) -> None:
        """A step's tokens, and those of them that belonged to sequences that had ended."""
        self.wasted_tokens += num_wasted
        self.generated_tokens += num_tokens - num_wasted
        self._depth.computed(num_tokens, num_wasted)

    def due(self, now: float, idle: bool) -> Stats | None:
        """A message if something changed and the last one is old, or the scheduler falls idle."""
        if not idle and now - self._sent_at < INTERVAL:
            return None
        stats = self.snapshot()
        if stats == self._sent:
            return None
        self._sent, self._sent_at = stats, now
        return stats

    def snapshot(self) -> Stats:
        running, builder = self._running, self._builder
        decoding = running.rows.size
        return Stats(
            num_running=running.num_running,
            num_waiting=max(0, self.num_open - decoding),
            pages_used=running.cache.num_used,
            pages_cached=running.cache.tree.num_cached,
            num_pages=running.cache.num_pages,
            prefix_queries=builder.prefix_queries,
            prefix_hits=builder.prefix_hits,
            num_preemptions=self._preemption.num_preemptions,
            prompt_tokens=builder.prompt_tokens,
            generated_tokens=self.generated_tokens,
            wasted_tokens=self.wasted_tokens,
            recomputed_tokens=builder.recomputed_tokens,
            num_started=builder.num_started,
            queue_seconds=round(builder.queue_seconds, 6),
            num_steps=self.num_steps,
            step_seconds=self.step_seconds,
            idle_seconds=self._depth.idle_seconds,
            device_idle_seconds=self.device_idle_seconds,
            num_compiles=self.num_compiles,
            depths=tuple(self._depth.histogram),
            forecast_us=percentiles(self._admission.forecast_times()),
            expected_length=self._admission.expected_length(),
            pipeline=tuple(self.stages.get(stage, NO_TIMES) for stage in range(max(self.stages, default=-1) + 1)),
        )


def percentiles(values: Sequence[float] | npt.NDArray[np.float32]) -> tuple[float, ...]:
    """The 50th, 99th and 100th, rounded to tenths; none of nothing."""
    return tuple(np.percentile(values, PERCENTILES).round(1).tolist()) if len(values) else ()
