"""Look-ahead admission: new work starts only if the forecast of page use stays below the size of the cache.

Joins the stopping predictor (how long) with the block forecast (how many pages, when). Every running sequence has a
fixed rank in the distribution of lengths, spread evenly, so that many sequences together follow the whole distribution.
The safety margin is the smaller the more sequences there are to average over; it grows with every preemption and fades
while there are none. Knows the running set; decides counts, not order.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from toka_async.arrays import Bool, Float64, Int32, Int64
from toka_async.messages import Forecast
from toka_async.scheduler.admission.forecast import Profile, UsageCurve, evenly
from toka_async.scheduler.admission.length_predictor import EVERYONE, StoppingPredictor
from toka_async.scheduler.admission.running_usage import running_usage, sequence_lanes
from toka_async.scheduler.sequences.requests import PrefillTask, PromptRun, Request
from toka_async.scheduler.sequences.running import RunningSet

WINDOW = 1024  # forecasts whose times are kept
LARGEST_MARGIN = 0.2  # share of the cache
SPREAD = 0.15  # of one sequence's use of pages, over its mean: that of many is as much less as there are more
PROMPT_SPREAD = 0.03  # likewise, of all samples of one prompt, as far as it is not learned in time
MARGIN_GROWTH = 0.25  # by preempting as many sequences as run
MARGIN_FADES = 300.0  # steps without preemption after which it has faded to 1/e
SMALLEST_GROUP = 16  # samples
UPDATE_EVERY = 4  # forecasts: what runs moves on by less than a bin, or little more
SHOWN = 32  # parts of a forecast that somebody looks at
PARTS = 8  # of the running sequences, whose expected lengths are looked up again in turn


@dataclass(slots=True)
class Growth:
    """Pages of one new sequence at each step to come, in expectation: `alive` is the share that gets there."""

    alive: Float64
    pages: Int64  # beyond those of its prompt
    _profiles: dict[int, Profile] = field(default_factory=dict)

    def profile(self, num_prompt_pages: int) -> Profile:
        profile = self._profiles.get(num_prompt_pages)
        if profile is None:
            pages = self.alive * (num_prompt_pages + self.pages)
            profile = self._profiles[num_prompt_pages] = Profile(pages, float(pages.max()))
        return profile


@dataclass(slots=True)
class LookAhead:
    """The forecast of one build at a time, kept while candidates are added to it."""

    running: RunningSet
    predictor: StoppingPredictor = field(default_factory=StoppingPredictor)
    margin: float = 0.01
    _times: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _curve: UsageCurve | None = None
    _growths: dict[tuple[int, int, int, int, bool], Growth] = field(default_factory=dict)
    _limit: int = 0  # pages that may be in use
    _turn: int = 0
    _grown: float = 0.0  # the part of the margin that preemptions made

    def forecast_times(self) -> Sequence[float]:
        return self._times

    def expected_length(self) -> tuple[float, float] | None:
        return self.predictor.mean_and_spread(EVERYONE)

    def begin(self, num_preemptions: int) -> None:
        """A new step is built; `num_preemptions` happened since the last."""
        self._curve = None
        self._growths.clear()
        rows = max(1, self.running.rows.size)
        uncertain = np.count_nonzero(self.running.lanes.can_stop[self.running.rows]) / rows
        least = math.sqrt(uncertain * (SPREAD**2 / rows + PROMPT_SPREAD**2 / max(1, len(self.running.runs))))
        self._grown *= math.exp(-1.0 / MARGIN_FADES)
        self._grown = min(LARGEST_MARGIN, self._grown + MARGIN_GROWTH * num_preemptions / rows)
        self.margin = min(LARGEST_MARGIN, least + self._grown)
        self._limit = int(self.running.cache.num_pages * (1.0 - self.margin))

    def closed(self, request: Request) -> None:
        self.predictor.close_group(request.group)

    def ended(self, lanes: Int32, tokens: Int32, by_length: Bool) -> None:
        """Sequences ended; those that could not have stopped earlier say nothing."""
        tables = self.running.lanes
        chosen = tables.can_stop[lanes]
        if chosen.any():
            lanes = lanes[chosen]
            self.predictor.observe(tables.group[lanes], tokens[chosen], tables.max_tokens[lanes], by_length[chosen])

    def samples_that_fit(self, run: PromptRun) -> int:
        """How many more samples of a computed prompt the forecast has room for."""
        return self._usage().room(self._sample_profile(run).pages, self._limit)

    def add_samples(self, run: PromptRun, count: int) -> None:
        """So many of them start."""
        self._usage().add(self._sample_profile(run).pages, count)

    def prompt_fits(self, job: PrefillTask, num_new_pages: int) -> bool:
        """Whether there is room for a prompt that takes so many new pages, and for (the first of) its samples."""
        usage, waiting = self._usage(), self.running.pending_runs()
        if waiting:  # their samples come first: a prompt computed long before its own only takes pages
            usage = usage.copy()
            for run in waiting:
                usage.add(self._sample_profile(run).pages, run.num_pending)
        return usage.fits(self._job_profile(job, num_new_pages), self._limit)

    def add_prompt(self, job: PrefillTask, num_new_pages: int) -> None:
        """It starts; of several samples, only the prompt is counted yet. They inform each other, if they are many."""
        request = job.request
        if request.can_stop and request.submit.n >= SMALLEST_GROUP and request.group == EVERYONE:
            request.group = self.predictor.open_group()
        if job.sample < 0:
            self._usage().hold(num_new_pages)
        else:
            self._usage().put(self._job_profile(job, num_new_pages))

    # ---- candidates

    def _sample_profile(self, run: PromptRun) -> Profile:
        request = run.request
        start = request.prompt.size - 1
        tail = -(-start // self.running.cache.page_size) - run.pages.size
        return self._growth(request, 0, start).profile(tail)

    def _job_profile(self, job: PrefillTask, num_new_pages: int) -> Profile:
        """A prompt's pages and those of its sample, or of the first of them."""
        generated = 0 if job.generated is None else job.generated.tokens.size
        return self._growth(job.request, generated, job.token_ids.size).profile(num_new_pages)

    def _growth(self, request: Request, generated: int, start: int) -> Growth:
        size = self.running.cache.page_size
        key = (request.group, request.max_tokens, generated, start % size, request.can_stop)
        growth = self._growths.get(key)
        if growth is None:
            steps = np.arange(max(1, request.max_tokens - generated))
            alive = np.ones(steps.size)
            if request.can_stop and not request.prompt_only:
                survival = self.predictor.survival(request.group, request.max_tokens)[generated:]
                alive = survival / max(float(survival[0]), 1e-9)
            pages = (start % size + steps + size) // size - -(-(start % size) // size)
            growth = self._growths[key] = Growth(alive, pages)
        return growth

    # ---- what runs

    def usage(self) -> Float64:
        """Pages in use at each step to come, what was admitted to the step being built included."""
        return self._usage().curve.copy()

    def forecast(self) -> Forecast:
        """Of what runs, to be shown."""
        usage = self._usage()
        return Forecast(steps=usage.curve.size, pages=evenly(usage, SHOWN), limit=self._limit)

    def _usage(self) -> UsageCurve:
        if self._curve is None:
            began = time.thread_time()
            self._curve = self._forecast()
            self._times.append((time.thread_time() - began) * 1e6)
        return self._curve

    def _forecast(self) -> UsageCurve:
        """Pages in use at each step from the one being built on, if everything ends when expected."""
        lanes = sequence_lanes(self.running)
        return running_usage(self.running, lanes, self._expect(lanes))

    def _expect(self, lanes: Int32) -> Int32:
        """Steps until each of the lanes is expected to end, at least 1.

        An end is known when its token has come back: until then steps are built as before.
        """
        tables = self.running.lanes
        left, known = tables.remaining[lanes], self.running.log.count[lanes]
        free = np.flatnonzero(tables.can_stop[lanes])
        if free.size == lanes.size:  # without copies of every column
            left = np.minimum(left, self._expected(lanes, known) - known)
        elif free.size:
            known = known[free]
            left[free] = np.minimum(left[free], self._expected(lanes[free], known) - known)
        remaining: Int32 = np.maximum(left, 1)
        return remaining

    def _expected(self, lanes: Int32, known: Int32) -> Int32:
        """Lengths of lanes that may stop, with so many tokens known; looked up anew in turn, and where passed."""
        tables = self.running.lanes
        if self._turn % UPDATE_EVERY == 0:
            self.predictor.update(tables.group[lanes], known, tables.max_tokens[lanes])
        self._turn = (self._turn + 1) % PARTS
        expected: Int32 = tables.expected[lanes]
        due = np.flatnonzero((expected <= known) | (lanes % PARTS == self._turn))
        some = lanes[due]
        lengths = self.predictor.lengths(
            tables.group[some], known[due], tables.max_tokens[some], tables.length_rank[some]
        )
        tables.expected[some] = expected[due] = lengths
        return expected
