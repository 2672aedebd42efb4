"""Admission policies to compare with: one that knows nothing but limits, and one that knows everything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from toka_async.arrays import Bool, Float64, Int32
from toka_async.bench.loads.lengths import Workload
from toka_async.messages import Forecast
from toka_async.scheduler.admission.forecast import UsageCurve, own_pages
from toka_async.scheduler.admission.running_usage import running_usage, sequence_lanes
from toka_async.scheduler.sequences.requests import PrefillTask, PromptRun, Request
from toka_async.scheduler.sequences.running import RunningSet

DELAY = 2  # steps by which a prompt may be computed later than at once, since others take the step's tokens


@dataclass(slots=True)
class Reserving:
    """Sets pages for max_tokens aside for every sequence: none is ever preempted."""

    running: RunningSet
    _reserved: int = -1

    def begin(self, num_preemptions: int) -> None:
        assert num_preemptions == 0
        self._reserved = -1

    def prompt_fits(self, job: PrefillTask, num_new_pages: int) -> bool:
        return self._pages_reserved() + self._prompt_pages(job, num_new_pages) <= self.running.cache.num_pages

    def add_prompt(self, job: PrefillTask, num_new_pages: int) -> None:
        self._reserved = self._pages_reserved() + self._prompt_pages(job, num_new_pages)

    def samples_that_fit(self, run: PromptRun) -> int:
        return (self.running.cache.num_pages - self._pages_reserved()) // self._sample_pages(run)

    def add_samples(self, run: PromptRun, count: int) -> None:
        self._reserved = self._pages_reserved() + count * self._sample_pages(run)

    def forecast_times(self) -> Sequence[float]:
        return ()

    def expected_length(self) -> tuple[float, float] | None:
        return None

    def forecast(self) -> Forecast | None:
        return None

    def closed(self, request: Request) -> None: ...

    def ended(self, lanes: Int32, tokens: Int32, by_length: Bool) -> None: ...

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.running.cache.page_size)

    def _sample_pages(self, run: PromptRun) -> int:
        return self._pages(run.request.prompt.size - 1 + run.request.max_tokens) - run.pages.size

    def _prompt_pages(self, job: PrefillTask, num_new_pages: int) -> int:
        """A prompt's, with those of its one sample."""
        if job.sample < 0:
            return num_new_pages
        return (
            num_new_pages + self._pages(job.token_ids.size + job.request.max_tokens) - self._pages(job.token_ids.size)
        )

    def _pages_reserved(self) -> int:
        if self._reserved < 0:
            running, tables = self.running, self.running.lanes
            lanes = sequence_lanes(running)
            tokens = tables.position[lanes] + tables.remaining[lanes]
            tokens[running.rows.size :] = [
                run.num_to_compute + run.request.max_tokens for run in running.prefilling if run.job.sample >= 0
            ]
            own = -(-tokens // running.cache.page_size) - tables.num_shared[lanes]
            shared = sum(run.pages.size + (run.tail_page >= 0) for run in running.runs.values())
            self._reserved = int(own.sum()) + shared
        return self._reserved


@dataclass(slots=True)
class Oracle:
    """Admits by a forecast that is right, since it knows how long every sequence will get.

    A sequence that stops is computed for `steps_ahead - 1` further steps, until its end is known.
    """

    running: RunningSet
    workload: Workload
    steps_ahead: int
    starts: Int32 = field(init=False)
    _curve: UsageCurve | None = None

    def __post_init__(self) -> None:
        self.starts = self.workload.starts

    def begin(self, num_preemptions: int) -> None:
        del num_preemptions
        self._curve = None

    def prompt_fits(self, job: PrefillTask, num_new_pages: int) -> bool:
        usage, waiting = self._usage(), [run for run in self.running.prefilling if run.num_pending]
        if waiting:  # their samples come first
            usage = usage.copy()
            for run in waiting:
                usage.add(self._samples_profile(run, run.num_pending))
        return usage.room(self._job_profile(job, num_new_pages), self.running.cache.num_pages) > 0

    def add_prompt(self, job: PrefillTask, num_new_pages: int) -> None:
        if job.sample < 0:
            self._usage().hold(num_new_pages)
        else:
            self._usage().add(self._job_profile(job, num_new_pages))

    def samples_that_fit(self, run: PromptRun) -> int:
        """Of the next samples in order, found by bisection: more samples never use less."""
        low, high = 0, run.num_pending + 1
        while high - low > 1:
            middle = (low + high) // 2
            fits = self._usage().room(self._samples_profile(run, middle), self.running.cache.num_pages) > 0
            low, high = (middle, high) if fits else (low, middle)
        return low

    def add_samples(self, run: PromptRun, count: int) -> None:
        self._usage().add(self._samples_profile(run, count))

    def forecast_times(self) -> Sequence[float]:
        return ()

    def expected_length(self) -> tuple[float, float] | None:
        return None

    def forecast(self) -> Forecast | None:
        return None

    def closed(self, request: Request) -> None: ...

    def ended(self, lanes: Int32, tokens: Int32, by_length: Bool) -> None: ...

    def _lengths(self, requests: Int32, samples: Int32) -> Int32:
        lengths: Int32 = self.workload.output_tokens[self.starts[requests] + samples]
        return lengths

    def _steps(self, lengths: Int32, built: Int32, limit: Int32) -> Int32:
        """Steps that compute sequences of these lengths, which have `built` tokens in steps so far."""
        late = np.where(lengths < limit, self.steps_ahead - 1, 0)
        steps: Int32 = np.maximum(np.minimum(lengths + late, limit) - built, 1).astype(np.int32)
        return steps

    def _samples_profile(self, run: PromptRun, count: int) -> Float64:
        """Pages of the run's next `count` samples together."""
        request, size = run.request, self.running.cache.page_size
        samples = np.arange(request.next_sample, request.next_sample + count, dtype=np.int32)
        lengths = self._lengths(np.full_like(samples, request.request_id), samples)
        steps = self._steps(lengths, np.zeros_like(samples), np.full_like(samples, request.max_tokens))
        position = np.full_like(samples, request.prompt.size - 1)
        held = -(-position // size) - run.pages.size
        return own_pages(position, steps, held, size, int(steps.max(initial=1))).astype(np.float64)

    def _job_profile(self, job: PrefillTask, num_new_pages: int) -> Float64:
        """A prompt and its one sample, or the first of its samples."""
        request, size = job.request, self.running.cache.page_size
        sample = np.asarray([max(job.sample, request.next_sample if job.sample < 0 else 0)], np.int32)
        generated = np.asarray([0 if job.generated is None else job.generated.tokens.size], np.int32)
        lengths = self._lengths(np.full_like(sample, request.request_id), sample)
        steps = self._steps(lengths, generated, np.full_like(sample, request.max_tokens)) + DELAY
        position = np.asarray([job.token_ids.size], np.int32)
        profile = own_pages(position, steps, np.zeros_like(position), size, int(steps[0]))
        return profile.astype(np.float64) + num_new_pages

    def _usage(self) -> UsageCurve:
        if self._curve is None:
            running, tables = self.running, self.running.lanes
            lanes = sequence_lanes(running)
            limit = tables.max_tokens[lanes]
            lengths = self._lengths(tables.request[lanes], tables.sample[lanes])
            steps = self._steps(lengths, limit - tables.remaining[lanes], limit)
            steps[running.rows.size :] += DELAY
            self._curve = running_usage(running, lanes, steps)
        return self._curve
