"""Replays a workload through the real scheduler in simulated time.

The simulated rank ends each sequence at its given length; a simple model says how long a step takes. Knows messages,
and reads the running set to see what is in use; decides nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from toka_async.arrays import Float64, as_bool, as_i32, as_i64, column, i32_column, next_rows
from toka_async.bench.loads.lengths import Workload
from toka_async.bench.loads.served import BenchError
from toka_async.messages import Failed, Ready, Stats, Step, StepDone, Submit, Tokens, TokenSampling
from toka_async.scheduler.admission.policy import Admission
from toka_async.scheduler.core import Core
from toka_async.scheduler.sequences.requests import sample_seeds
from toka_async.scheduler.sequences.running import RunningSet

END = 1  # the token that ends a sequence; all others are 0
VOCAB = 50_000


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step: a constant, plus some for each decoding row and prompt token. Like a 1B model on one GPU."""

    base: float = 2e-3
    row: float = 4.5e-6
    prompt_token: float = 5e-6

    def seconds(self, rows: int, prompt_tokens: int) -> float:
        return self.base + rows * self.row + prompt_tokens * self.prompt_token


class LengthRank:
    """Runs steps on columns over slots: the tokens of a slot's sequence, and the number at which it ends."""

    def __init__(self, workload: Workload, max_seqs: int, cost: StepCost) -> None:
        requests = np.repeat(np.arange(workload.samples.size), workload.samples)
        samples = np.arange(requests.size) - workload.starts[requests]
        seeds = sample_seeds(requests.astype(np.uint64), samples.astype(np.int32))
        order = np.argsort(seeds)
        ends = np.where(workload.output_tokens < workload.max_tokens[requests], workload.output_tokens, -1)
        self._seeds, self._ends = seeds[order], ends[order]
        self._cost = cost
        self._end = np.zeros(max_seqs, np.int64)
        self._generated = np.zeros(max_seqs, np.int64)
        self._known: dict[int, int] = {}  # prompt's key -> generated tokens that are in the prompt
        self._rows = np.empty(0, np.int32)

    def run(self, step: Step) -> StepDone:
        self._apply(step)
        chunks = as_i32(step.chunk_slots)[as_bool(step.chunk_samples)]
        slots = np.concatenate([self._rows, chunks])
        self._generated[slots] += 1
        tokens = np.where(self._generated[slots] == self._end[slots], np.int32(END), np.int32(0))
        seconds = self._cost.seconds(self._rows.size, int(as_i32(step.chunk_lengths).sum()))
        return StepDone(step_id=step.step_id, token_ids=column(tokens), seconds=seconds)

    def _apply(self, step: Step) -> None:
        for key in as_i32(step.dropped_prompts).tolist():
            del self._known[key]
        for prompt in step.prompts:
            self._known[prompt.key] = len(prompt.token_ids) // 4 - prompt.num_prompt
        slots, seeds = as_i32(step.admit_slots), as_i64(step.admit_seeds)
        if slots.size:
            places = np.minimum(np.searchsorted(self._seeds, seeds), self._seeds.size - 1)
            self._end[slots] = np.where(self._seeds[places] == seeds, self._ends[places], -1)
            self._generated[slots] = [self._known[key] for key in as_i32(step.admit_keys).tolist()]
        self._rows = next_rows(self._rows, as_i32(step.freed), as_i32(step.joined))


@dataclass(slots=True)
class Outcome:
    """The result of a replay.

    limited: seconds in which work waited for pages: a slot was free, and tokens of the step were left over. used: the
    integral of pages in use over these seconds, in page-seconds. pages: in use at each step. ends: by request, when its
    last sequence had ended. all_ends: of every sequence.
    """

    seconds: float = 0.0
    limited: float = 0.0
    used: float = 0.0
    stats: Stats = field(default_factory=Stats)
    pages: list[int] = field(default_factory=list)
    ends: dict[int, float] = field(default_factory=dict)
    all_ends: list[float] = field(default_factory=list)
    forecasts: list[tuple[int, Float64]] = field(default_factory=list)

    def cache_use(self, num_pages: int) -> float | None:
        """Returns the share of the cache in use while it was the limit; None: it never was."""
        return self.used / (self.limited * num_pages) if self.limited else None


class Replay:
    """One policy's run of a workload, all of which is there from the start."""

    def __init__(
        self,
        workload: Workload,
        ready: Ready,
        policy: Callable[[RunningSet], Admission],
        *,
        steps_ahead: int = 2,
        cost: StepCost | None = None,
        look: Callable[[], Float64] | None = None,
        look_every: int = 100,
    ) -> None:
        """look: reads the policy's forecast, every `look_every` steps."""
        self._policy = policy
        self._running: RunningSet
        self._workload, self._max_tokens = workload, ready.max_tokens
        self._rank = LengthRank(workload, ready.max_seqs, cost or StepCost())
        self._core = Core(ready, max_tokens=ready.max_tokens, steps_ahead=steps_ahead, admission=self._admission)
        self._look, self._look_every = look, look_every
        self._num_open = workload.output_tokens.size
        self._num_tokens = 0
        self._outcome = Outcome()

    def run(self) -> Outcome:
        """Raises BenchError when a request can never run."""
        outcome, queued, now = self._outcome, deque[Step](), 0.0
        self._submit()
        while True:
            for step in self._core.next_steps(now):
                queued.extend(step.passes())
            self._core.note_sent(now)
            if not queued:
                break
            done = self._rank.run(queued[0])
            self._note(queued[-1], done.seconds)
            queued.popleft()
            now += done.seconds
            self._core.complete(done, now)
            self._receive(now)
        outcome.seconds = now
        assert self._num_open == 0, "work is left that nothing moves"
        assert self._num_tokens == self._workload.num_output_tokens, "every sequence has its length"
        return outcome

    def _admission(self, running: RunningSet) -> Admission:
        self._running = running
        return self._policy(running)

    def _submit(self) -> None:
        """Submits random prompts, so that none is another's prefix."""
        work, rng = self._workload, np.random.default_rng(0)
        sampling = TokenSampling(end_ids=i32_column([END]))
        columns = (work.prompt_tokens, work.max_tokens, work.samples)
        for i, (prompt, limit, n) in enumerate(zip(*(values.tolist() for values in columns), strict=True)):
            tokens = column(rng.integers(0, VOCAB, prompt, dtype=np.int32))
            submit = Submit(request_id=i, prompt=tokens, n=n, max_tokens=limit, seed=i, sampling=sampling)
            self._core.submit(submit, 0.0)
        self._receive(0.0)

    def _note(self, newest: Step, seconds: float) -> None:
        """Records the page use, which the newest step left, for the time of the oldest queued step."""
        running, outcome, table = self._running, self._outcome, self._running.table
        used = running.cache.num_used
        outcome.pages.append(used)
        if self._look is not None and len(outcome.pages) % self._look_every == 1:
            outcome.forecasts.append((len(outcome.pages) - 1, self._look()))
        spent = running.rows.size + int(as_i32(newest.chunk_lengths).sum()) >= self._max_tokens
        started = np.count_nonzero(table.alive & (table.sample >= 0))
        if self._num_open > started and running.num_free_slots and not spent:
            outcome.limited += seconds
            outcome.used += used * seconds

    def _receive(self, now: float) -> None:
        self._outcome.stats = self._core.take_stats(now) or self._outcome.stats
        for message in self._core.take_messages():
            match message:
                case Tokens():
                    ended = as_i32(message.request_ids)[as_i32(message.reasons) != 0].tolist()
                    self._num_open -= len(ended)
                    self._outcome.ends.update(dict.fromkeys(ended, now))
                    self._outcome.all_ends += [now] * len(ended)
                    self._num_tokens += int(as_i32(message.counts).sum())
                case Failed():
                    raise BenchError(f"request {message.request_id}: {message.message}")
                case _:
                    pass
