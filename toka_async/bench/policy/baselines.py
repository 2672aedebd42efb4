"""Admission policies to compare with: one that knows only limits, and one that knows every length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from toka_async.arrays import Bool, Float64, Int32
from toka_async.bench.loads.lengths import Workload
from toka_async.messages import Forecast
from toka_async.scheduler.admission.forecast import UsageCurve, forecast_own_pages
from toka_async.scheduler.admission.running_usage import find_running_seqs, forecast_running
from toka_async.scheduler.sequences.requests import PrefillTask, PromptRun, Request
from toka_async.scheduler.sequences.running import RunningSet

DELAY = 2  # steps by which other prompts may delay a prompt


@dataclass(slots=True)
class Reserving:
    """Reserves pages for max_tokens for every sequence, so that none is ever preempted."""

    running: RunningSet
    _reserved: int = -1

    def begin(self, num_preemptions: int) -> None:
        assert num_preemptions == 0
        self._reserved = -1

    def prompt_fits(self, task: PrefillTask, num_new_pages: int) -> bool:
        return self._pages_reserved() + self._prompt_pages(task, num_new_pages) <= self.running.cache.num_pages

    def add_prompt(self, task: PrefillTask, num_new_pages: int) -> None:
        self._reserved = self._pages_reserved() + self._prompt_pages(task, num_new_pages)

    def count_fitting_samples(self, run: PromptRun) -> int:
        return (self.running.cache.num_pages - self._pages_reserved()) // self._sample_pages(run)

    def add_samples(self, run: PromptRun, count: int) -> None:
        self._reserved = self._pages_reserved() + count * self._sample_pages(run)

    def forecast_times(self) -> Sequence[float]:
        return ()

    def expected_length(self) -> tuple[float, float] | None:
        return None

    def forecast(self) -> Forecast | None:
        return None

    def close_request(self, request: Request) -> None: ...

    def observe_ends(self, seqs: Int32, tokens: Int32, by_length: Bool) -> None: ...

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.running.cache.page_size)

    def _sample_pages(self, run: PromptRun) -> int:
        return self._pages(run.request.prompt.size - 1 + run.request.max_tokens) - run.pages.size

    def _prompt_pages(self, task: PrefillTask, num_new_pages: int) -> int:
        """Returns the pages of a prompt, with those of its one sample."""
        if task.sample < 0:
            return num_new_pages
        return (
            num_new_pages
            + self._pages(task.token_ids.size + task.request.max_tokens)
            - self._pages(task.token_ids.size)
        )

    def _pages_reserved(self) -> int:
        if self._reserved < 0:
            running, table = self.running, self.running.table
            seqs = find_running_seqs(running)
            tokens = table.position[seqs] + table.remaining[seqs]
            tokens[running.rows.size :] = [
                run.num_to_compute + run.request.max_tokens for run in running.prefilling if run.task.sample >= 0
            ]
            own = -(-tokens // running.cache.page_size) - table.num_shared[seqs]
            shared = sum(run.pages.size + (run.tail_page >= 0) for run in running.runs.values())
            self._reserved = int(own.sum()) + shared
        return self._reserved


@dataclass(slots=True)
class Oracle:
    """Admits by an exact forecast, since it knows how long every sequence will get.

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

    def prompt_fits(self, task: PrefillTask, num_new_pages: int) -> bool:
        usage, waiting = self._usage(), [run for run in self.running.prefilling if run.num_pending]
        if waiting:  # their samples come first
            usage = usage.copy()
            for run in waiting:
                usage.add(self._samples_profile(run, run.num_pending))
        return usage.count_that_fit(self._task_profile(task, num_new_pages), self.running.cache.num_pages) > 0

    def add_prompt(self, task: PrefillTask, num_new_pages: int) -> None:
        if task.sample < 0:
            self._usage().hold(num_new_pages)
        else:
            self._usage().add(self._task_profile(task, num_new_pages))

    def count_fitting_samples(self, run: PromptRun) -> int:
        """Returns how many of the next samples fit, by bisection: more samples never use less."""
        low, high = 0, run.num_pending + 1
        while high - low > 1:
            middle = (low + high) // 2
            fits = self._usage().count_that_fit(self._samples_profile(run, middle), self.running.cache.num_pages) > 0
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

    def close_request(self, request: Request) -> None: ...

    def observe_ends(self, seqs: Int32, tokens: Int32, by_length: Bool) -> None: ...

    def _lengths(self, requests: Int32, samples: Int32) -> Int32:
        lengths: Int32 = self.workload.output_tokens[self.starts[requests] + samples]
        return lengths

    def _steps(self, lengths: Int32, built: Int32, limit: Int32) -> Int32:
        """Returns the steps that compute sequences of these lengths, which have `built` tokens in steps so far."""
        late = np.where(lengths < limit, self.steps_ahead - 1, 0)
        steps: Int32 = np.maximum(np.minimum(lengths + late, limit) - built, 1).astype(np.int32)
        return steps

    def _samples_profile(self, run: PromptRun, count: int) -> Float64:
        """Returns the pages of the run's next `count` samples together."""
        request, size = run.request, self.running.cache.page_size
        samples = np.arange(request.next_sample, request.next_sample + count, dtype=np.int32)
        lengths = self._lengths(np.full_like(samples, request.request_id), samples)
        steps = self._steps(lengths, np.zeros_like(samples), np.full_like(samples, request.max_tokens))
        position = np.full_like(samples, request.prompt.size - 1)
        held = -(-position // size) - run.pages.size
        return forecast_own_pages(position, steps, held, size, int(steps.max(initial=1))).astype(np.float64)

    def _task_profile(self, task: PrefillTask, num_new_pages: int) -> Float64:
        """Returns the pages of a prompt and its one sample, or its first sample."""
        request, size = task.request, self.running.cache.page_size
        sample = np.asarray([max(task.sample, request.next_sample if task.sample < 0 else 0)], np.int32)
        generated = np.asarray([0 if task.generated is None else task.generated.tokens.size], np.int32)
        lengths = self._lengths(np.full_like(sample, request.request_id), sample)
        steps = self._steps(lengths, generated, np.full_like(sample, request.max_tokens)) + DELAY
        position = np.asarray([task.token_ids.size], np.int32)
        profile = forecast_own_pages(position, steps, np.zeros_like(position), size, int(steps[0]))
        return profile.astype(np.float64) + num_new_pages

    def _usage(self) -> UsageCurve:
        if self._curve is None:
            running, table = self.running, self.running.table
            seqs = find_running_seqs(running)
            limit = table.max_tokens[seqs]
            lengths = self._lengths(table.request[seqs], table.sample[seqs])
            steps = self._steps(lengths, limit - table.remaining[seqs], limit)
            steps[running.rows.size :] += DELAY
            self._curve = forecast_running(running, seqs, steps)
        return self._curve
