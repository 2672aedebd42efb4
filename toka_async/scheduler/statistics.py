"""The Stats message: when it is due, and its numbers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from toka_async.arrays import EMPTY, Int64, as_i32, column
from toka_async.messages import GAP_SECONDS, ExpertLoads, MaskWork, Stats, StepDone
from toka_async.scheduler.admission.policy import Admission
from toka_async.scheduler.admission.preemption import Preemption
from toka_async.scheduler.builder import StepBuilder, StepRecord
from toka_async.scheduler.depth import StepDepth
from toka_async.scheduler.sequences.running import RunningSet
from toka_async.scheduler.time_predictor import TimePredictor

PERCENTILES = (50, 99, 100)
NO_TIMES = (0.0, 0.0, 0.0)
INTERVAL = 0.25  # seconds between two messages while work goes on


class StatsSource:
    def __init__(
        self,
        running: RunningSet,
        builder: StepBuilder,
        preemption: Preemption,
        depth: StepDepth,
        admission: Admission,
        predictor: TimePredictor,
    ) -> None:
        self._running = running
        self._builder = builder
        self._preemption = preemption
        self._depth = depth
        self._admission = admission
        self._predictor = predictor
        self._sent: Stats | None = None
        self._sent_at = float("-inf")
        self._asked = 0
        self._wants_forecast = False
        self._gaps = [0] * (len(GAP_SECONDS) + 1)
        self._gap_seconds = 0.0
        self._stepped_at = 0.0  # when the newest step came back
        self._since_step = 0.0  # seconds between it and the step before it
        self.num_open = 0  # samples of open requests that have not ended
        self.generated_tokens = 0
        self.wasted_tokens = 0
        self.num_steps = 0
        self.step_seconds = 0.0
        self.num_prompt_steps = 0
        self.prompt_step_seconds = 0.0
        self.device_idle_seconds = 0.0
        self.num_compiles = 0
        self.masks = MaskWork(0, 0.0, 0.0)
        self._loads: dict[int, Int64] = {}  # by layer: tokens that chose each expert
        self.stages: dict[int, tuple[float, float, float]] = {}  # by stage: see `Stats.pipeline`

    def note_question(self, number: int, forecast: bool) -> None:
        """Note that the server wants statistics now, perhaps with a forecast."""
        self._asked, self._wants_forecast = number, forecast or self._wants_forecast

    def count_step(self, done: StepDone, record: StepRecord, now: float) -> None:
        """Count a completed step."""
        self._since_step, self._stepped_at = now - self._stepped_at, now
        self.num_steps += 1
        self.step_seconds += done.seconds
        if record.work.pairs:
            self.num_prompt_steps += 1
            self.prompt_step_seconds += done.seconds
        self.device_idle_seconds += done.waited if record.was_queued else 0.0
        self.num_compiles = done.num_compiles
        if (work := done.masks) is not None:
            sums = self.masks
            self.masks = MaskWork(sums.rows + work.rows, sums.seconds + work.seconds, sums.stalled + work.stalled)

    def count_tokens(self, num_tokens: int, num_wasted: int, num_first: int) -> None:
        """Count the newest step's tokens, with those of ended sequences and those that are their sequence's first.

        All others follow their sequence's token of the step before: a running sequence is in every step.
        """
        self._add_gaps(self._since_step, num_tokens - num_wasted - num_first)
        self.wasted_tokens += num_wasted
        self.generated_tokens += num_tokens - num_wasted
        self._depth.count_tokens(num_tokens, num_wasted)

    def add_loads(self, loads: ExpertLoads) -> None:
        """Add what a stage has counted since the last time."""
        for layer, counts in zip(loads.layers, loads.counts, strict=True):
            self._loads[layer] = self._loads.get(layer, 0) + as_i32(counts).astype(np.int64)

    def count_resumed(self, since: float) -> None:
        """Count the first token of a sequence since its preemption, whose token before that came at `since`."""
        self._add_gaps(self._stepped_at - since, 1)

    def _add_gaps(self, seconds: float, count: int) -> None:
        self._gaps[bisect_left(GAP_SECONDS, seconds)] += count
        self._gap_seconds += seconds * count

    def take_due(self, now: float, idle: bool) -> Stats | None:
        """Make a message if one is asked for, if a change waited for long enough, or if the scheduler falls idle."""
        is_asked = self._sent is None or self._asked > self._sent.answers
        if not idle and not is_asked and now - self._sent_at < INTERVAL:
            return None
        stats = self.snapshot()
        if stats == self._sent:
            return None
        self._sent, self._sent_at = stats, now
        if not self._wants_forecast:
            return stats
        self._wants_forecast = False
        return msgspec.structs.replace(stats, forecast=self._admission.forecast())

    def snapshot(self) -> Stats:
        running, counts = self._running, self._builder.counts
        num_prompts = sum(run.num_seqs == 0 for run in running.forking)  # computed, no sample has started
        num_begun = min(self.num_open, int(np.count_nonzero(running.table.alive)) + num_prompts)
        windows = running.cache.windows
        return Stats(
            num_running=min(num_begun, running.max_seqs),
            num_waiting=self.num_open - num_begun,
            pages_used=running.cache.num_used,
            pages_cached=running.cache.tree.num_cached,
            num_pages=running.cache.num_pages,
            num_window_pages=0 if windows is None else windows.num_window_pages,
            window_pages_used=0 if windows is None else windows.num_used,
            window_pages_cached=0 if windows is None else windows.num_cached,
            num_snapshots=running.cache.snapshots.num_snapshots,
            snapshots_used=running.cache.snapshots.num_held,
            snapshots_cached=running.cache.snapshots.num_cached,
            prefix_queries=counts.prefix_queries,
            prefix_hits=counts.prefix_hits,
            prefix_shared=counts.prefix_shared,
            num_preemptions=self._preemption.num_preemptions,
            prompt_tokens=counts.prompt_tokens,
            generated_tokens=self.generated_tokens,
            wasted_tokens=self.wasted_tokens,
            recomputed_tokens=counts.recomputed_tokens,
            num_started=counts.num_started,
            queue_seconds=round(counts.queue_seconds, 6),
            num_steps=self.num_steps,
            step_seconds=self.step_seconds,
            idle_seconds=self._depth.idle_seconds,
            device_idle_seconds=self.device_idle_seconds,
            num_compiles=self.num_compiles,
            depths=tuple(self._depth.histogram),
            forecast_us=percentiles(self._admission.forecast_times()),
            expected_length=self._admission.expected_length(),
            token_gaps=tuple(self._gaps),
            token_gap_seconds=round(self._gap_seconds, 6),
            num_prompt_steps=self.num_prompt_steps,
            prompt_step_seconds=self.prompt_step_seconds,
            step_costs=self._predictor.costs,
            masked_rows=self.masks.rows,
            mask_seconds=self.masks.seconds,
            mask_stall_seconds=self.masks.stalled,
            answers=self._asked,
            expert_loads=tuple(
                column(self._loads[layer]) if layer in self._loads else EMPTY
                for layer in range(max(self._loads, default=-1) + 1)
            ),
            pipeline=tuple(self.stages.get(stage, NO_TIMES) for stage in range(max(self.stages, default=-1) + 1)),
        )


def percentiles(values: Sequence[float] | npt.NDArray[np.float32]) -> tuple[float, ...]:
    """The 50th, 99th and 100th percentile, rounded to tenths; () for no values."""
    return tuple(np.percentile(values, PERCENTILES).round(1).tolist()) if len(values) else ()
