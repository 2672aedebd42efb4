"""Look-ahead admission: new work starts only if the forecast of page use stays below the size of the cache.

Joins the length predictor with the block forecast. Every running sequence has a fixed rank in the distribution of
lengths, spread evenly, so that many sequences together follow the whole distribution. The safety margin is smaller the
more sequences there are to average over; it grows with every preemption and fades without. Knows the running set;
decides counts, not order.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from toka_async.arrays import Bool, Float64, Int32, Int64
from toka_async.messages import Forecast
from toka_async.scheduler.admission.forecast import Profile, UsageCurve, sample_evenly
from toka_async.scheduler.admission.length_predictor import EVERYONE, LengthPredictor
from toka_async.scheduler.admission.running_usage import find_running_seqs, forecast_running, forecast_windows
from toka_async.scheduler.cache.window_pool import count_window_span
from toka_async.scheduler.sequences.requests import PrefillTask, PromptRun, Request
from toka_async.scheduler.sequences.running import RunningSet

WINDOW = 1024  # forecasts whose times are kept
LARGEST_MARGIN = 0.2  # share of the cache
SPREAD = 0.15  # of one sequence's use of pages, relative to its mean; averages out over many
PROMPT_SPREAD = 0.03  # likewise, of all samples of one prompt, as far as not learned in time
MARGIN_GROWTH = 0.25  # when as many sequences are preempted as run
MARGIN_FADES = 300.0  # steps without preemption after which the growth has faded to 1/e
SMALLEST_GROUP = 16  # samples
UPDATE_EVERY = 4  # forecasts: sequences move by about a bin or less meanwhile
SHOWN = 32  # parts of a forecast in a Stats message
MANY = 1 << 30  # pages, more than a cache has
CHUNK_PART = 8  # of window pages, the part that sequences leave to chunks of prompts
PARTS = 8  # of the running sequences; the lengths of one part are predicted again at a time


@dataclass(slots=True)
class Growth:
    """Expected pages of one new sequence at each step to come: `alive` is the share that gets there."""

    alive: Float64
    pages: Int64  # beyond the prompt's
    _profiles: dict[tuple[int, int], Profile] = field(default_factory=dict)

    def profile(self, num_prompt_pages: int, most: int) -> Profile:
        profile = self._profiles.get((num_prompt_pages, most))
        if profile is None:
            pages = self.alive * np.minimum(num_prompt_pages + self.pages, most)
            profile = self._profiles[num_prompt_pages, most] = Profile(pages, float(pages.max()))
        return profile


@dataclass(slots=True)
class PageKind:
    """Pages of all tokens, or window pages, in the forecast of one build.

    num_pages: that sequences may have. most: of one sequence. curve: forecast; limit: what may be in use.
    """

    num_pages: int
    most: int
    forecast: Callable[[RunningSet, Int32, Int32], UsageCurve]
    curve: UsageCurve
    limit: int = 0


def list_page_kinds(running: RunningSet) -> list[PageKind]:
    kinds = [PageKind(running.cache.num_pages, MANY, forecast_running, UsageCurve(np.zeros(1)))]
    if running.windows is not None:
        pool = running.windows.pool
        # Chunks of prompts take some more for a step.
        num_pages = pool.num_window_pages - pool.num_window_pages // CHUNK_PART
        span = count_window_span(pool.window, pool.page_size)
        kinds.append(PageKind(num_pages, span, forecast_windows, UsageCurve(np.zeros(1))))
    return kinds


@dataclass(slots=True)
class LookAhead:
    """The forecast of one build at a time, to which candidates are added."""

    running: RunningSet
    predictor: LengthPredictor = field(default_factory=LengthPredictor)
    margin: float = 0.01
    _times: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _kinds: list[PageKind] = field(init=False)
    _is_current: bool = False  # the kinds' curves are this build's
    _growths: dict[tuple[int, int, int, int, bool], Growth] = field(default_factory=dict)
    _turn: int = 0
    _grown: float = 0.0  # the part of the margin due to preemptions

    def __post_init__(self) -> None:
        self._kinds = list_page_kinds(self.running)

    def forecast_times(self) -> Sequence[float]:
        return self._times

    def expected_length(self) -> tuple[float, float] | None:
        return self.predictor.mean_and_spread(EVERYONE)

    def begin(self, num_preemptions: int) -> None:
        self._is_current = False
        self._growths.clear()
        rows = max(1, self.running.rows.size)
        uncertain = np.count_nonzero(self.running.table.can_stop[self.running.rows]) / rows
        least = math.sqrt(uncertain * (SPREAD**2 / rows + PROMPT_SPREAD**2 / max(1, len(self.running.runs))))
        self._grown *= math.exp(-1.0 / MARGIN_FADES)
        self._grown = min(LARGEST_MARGIN, self._grown + MARGIN_GROWTH * num_preemptions / rows)
        self.margin = min(LARGEST_MARGIN, least + self._grown)
        for kind in self._kinds:
            kind.limit = int(kind.num_pages * (1.0 - self.margin))

    def close_request(self, request: Request) -> None:
        self.predictor.close_group(request.group)

    def observe_ends(self, seqs: Int32, tokens: Int32, by_length: Bool) -> None:
        """Learn from sequences that ended; those that could not have stopped earlier say nothing."""
        table = self.running.table
        chosen = table.can_stop[seqs]
        if chosen.any():
            seqs = seqs[chosen]
            self.predictor.observe(table.group[seqs], tokens[chosen], table.max_tokens[seqs], by_length[chosen])

    def count_fitting_samples(self, run: PromptRun) -> int:
        """Count the further samples of a computed prompt that the forecast has room for."""
        return min(
            kind.curve.count_that_fit(self._sample_profile(run, kind).pages, kind.limit) for kind in self._forecast()
        )

    def add_samples(self, run: PromptRun, count: int) -> None:
        for kind in self._forecast():
            kind.curve.add(self._sample_profile(run, kind).pages, count)

    def prompt_fits(self, task: PrefillTask, num_new_pages: int) -> bool:
        """Whether there is room for a prompt that takes `num_new_pages`, and for (the first of) its samples."""
        waiting = self.running.pending_runs()
        for kind in self._forecast():
            usage = kind.curve
            if waiting:  # their samples come first: a prompt computed too early only takes pages
                usage = usage.copy()
                for run in waiting:
                    usage.add(self._sample_profile(run, kind).pages, run.num_pending)
            if not usage.fits(self._task_profile(task, num_new_pages, kind), kind.limit):
                return False
        return True

    def add_prompt(self, task: PrefillTask, num_new_pages: int) -> None:
        """Reserve for a prompt; of several samples none counts yet. Many samples inform each other as a group."""
        request = task.request
        if request.can_stop and request.submit.n >= SMALLEST_GROUP and request.group == EVERYONE:
            request.group = self.predictor.open_group()
        for kind in self._forecast():
            if task.sample < 0:
                kind.curve.hold(min(num_new_pages, kind.most))
            else:
                kind.curve.put(self._task_profile(task, num_new_pages, kind))

    # ---- candidates

    def _sample_profile(self, run: PromptRun, kind: PageKind) -> Profile:
        request = run.request
        start = request.prompt.size - 1
        tail = -(-start // self.running.cache.page_size) - run.pages.size
        return self._growth(request, 0, start).profile(tail, kind.most)

    def _task_profile(self, task: PrefillTask, num_new_pages: int, kind: PageKind) -> Profile:
        """The pages of a prompt and of its sample, or of the first of several."""
        generated = 0 if task.generated is None else task.generated.tokens.size
        return self._growth(task.request, generated, task.token_ids.size).profile(num_new_pages, kind.most)

    def _growth(self, request: Request, generated: int, start: int) -> Growth:
        size = self.running.cache.page_size
        key = (request.group, request.max_tokens, generated, start % size, request.can_stop)
        growth = self._growths.get(key)
        if growth is None:
            steps = np.arange(max(1, request.max_tokens - generated))
            alive = np.ones(steps.size)
            if request.can_stop and not request.is_prompt_only:
                survival = self.predictor.predict_survival(request.group, request.max_tokens)[generated:]
                alive = survival / max(float(survival[0]), 1e-9)
            pages = (start % size + steps + size) // size - -(-(start % size) // size)
            growth = self._growths[key] = Growth(alive, pages)
        return growth

    # ---- what runs

    def usage(self) -> Float64:
        """Forecast pages in use at each step to come, with what the step being built admits."""
        return self._forecast()[0].curve.curve.copy()

    def forecast(self) -> Forecast:
        kind = self._forecast()[0]
        return Forecast(steps=kind.curve.curve.size, pages=sample_evenly(kind.curve, SHOWN), limit=kind.limit)

    def _forecast(self) -> list[PageKind]:
        """Forecast pages in use at each step from the one being built, if everything ends when expected."""
        if not self._is_current:
            began = time.thread_time()
            self._is_current = True
            running = self.running
            seqs = find_running_seqs(running)
            is_idle = not seqs.size and not running.forking and not running.prefilling
            ends = seqs if is_idle else self._expect_ends(seqs)
            for kind in self._kinds:  # a lone request should not wait for this
                kind.curve = UsageCurve(np.zeros(1)) if is_idle else kind.forecast(running, seqs, ends)
            self._times.append((time.thread_time() - began) * 1e6)
        return self._kinds

    def _expect_ends(self, seqs: Int32) -> Int32:
        """Expect the number of steps until each of the sequences ends, at least 1.

        An end is known when its token has come back: until then steps are built as before.
        """
        table = self.running.table
        left, known = table.remaining[seqs], self.running.log.count[seqs]
        free = np.flatnonzero(table.can_stop[seqs])
        if free.size == seqs.size:  # avoids copies of every column
            left = np.minimum(left, self._expect_lengths(seqs, known) - known)
        elif free.size:
            known = known[free]
            left[free] = np.minimum(left[free], self._expect_lengths(seqs[free], known) - known)
        remaining: Int32 = np.maximum(left, 1)
        return remaining

    def _expect_lengths(self, seqs: Int32, known: Int32) -> Int32:
        """Lengths of sequences that may stop, with `known` tokens; predicted again in turn and once passed."""
        table = self.running.table
        if self._turn % UPDATE_EVERY == 0:
            self.predictor.update(table.group[seqs], known, table.max_tokens[seqs])
        self._turn = (self._turn + 1) % PARTS
        expected: Int32 = table.expected[seqs]
        due = np.flatnonzero((expected <= known) | (seqs % PARTS == self._turn))
        some = seqs[due]
        lengths = self.predictor.predict_lengths(
            table.group[some], known[due], table.max_tokens[some], table.length_rank[some]
        )
        table.expected[some] = expected[due] = lengths
        return expected
