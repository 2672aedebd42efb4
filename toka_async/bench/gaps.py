"""`toka-async bench gaps`: what limits of a step's time do to gaps between tokens and to tokens/s, in simulated time.

The scheduler is the real one with this configuration; a simulated device says how long its steps take. Two loads: users
who stream, each of whom asks again when answered, and the requests of a trace, all there from the start.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import msgspec
import numpy as np

from toka_async.arrays import as_bool, as_i32, column
from toka_async.bench.loads.served import BenchError
from toka_async.bench.loads.trace import Lengths, draw_trace, read_trace
from toka_async.bench.report import format_table
from toka_async.config import Config, load_config
from toka_async.messages import Failed, Prefills, Ready, Step, Submit, Tokens, TokenSampling
from toka_async.procs.scheduler import make_core
from toka_async.startup.simulated import SimulatedRank

VOCAB = 32_000
PAGE = 16
PERCENTILES = (50, 99, 100)


class GapsResult(msgspec.Struct, frozen=True, kw_only=True):
    """One load under one limit. Times are percentiles (50, 99, 100), in milliseconds.

    gaps: between two tokens of a sample. first_token: from submission. prompt_steps: of the steps with prompts.
    """

    load: str
    max_step_ms: str
    tokens_per_second: float
    seconds: float
    steps: int
    gaps: tuple[float, ...]
    first_token: tuple[float, ...]
    prompt_steps: tuple[float, ...]


def main(options: argparse.Namespace) -> int:
    try:
        check_options(options)
        loads = build_loads(options)
    except BenchError as error:
        print(f"toka-async: {error}", file=sys.stderr)
        return 2
    results = []
    for limit in options.limits:
        config = load_config(overrides=make_overrides(options, limit))
        results += [Simulation(config, load).run(limit) for load in loads]
    if options.json:
        print(msgspec.json.encode(results).decode())
    else:
        print("\n".join(format_results(results)))
    return 0


def check_options(options: argparse.Namespace) -> None:
    """Raises BenchError for options that leave nothing to compare or to measure."""
    if any(each.lstrip("-").startswith("schedule.max_step_ms=") for each in options.overrides):
        raise BenchError("schedule.max_step_ms: the limits to compare are those of --limits; use --limits")
    if not (options.step_ms or options.token_us or options.key_ns):
        raise BenchError("steps take no time; one of --step-ms, --token-us and --key-ns must be above 0")


def make_overrides(options: argparse.Namespace, limit: str) -> list[str]:
    """Makes the configuration; the user's overrides come last and so take precedence."""
    return [
        "model.device=simulated",
        f"simulated.step_ms={options.step_ms}",
        f"simulated.token_us={options.token_us}",
        f"simulated.key_ns={options.key_ns}",
        f"schedule.max_step_ms={limit}",
        *options.overrides,
    ]


@dataclass(frozen=True, slots=True)
class GapsLoad:
    """Requests (prompt tokens, output tokens) in order; at most `at_once` are open."""

    name: str
    lengths: Lengths
    at_once: int
    stream: bool


def build_loads(options: argparse.Namespace) -> list[GapsLoad]:
    """Raises BenchError for a trace that cannot be read."""
    each = (options.prompt_tokens, options.output_tokens)
    if options.trace is None:
        trace = draw_trace(options.requests, random.Random(options.seed))
    else:
        trace = read_trace(options.trace, options.requests)
    return [
        GapsLoad("users", [each] * (options.rounds * options.users), options.users, stream=True),
        GapsLoad("trace", trace, len(trace), stream=False),
    ]


@dataclass(slots=True)
class Seen:
    """Seconds of gaps, each so often as tokens had it, until first tokens, and of steps with prompts."""

    gaps: list[float] = field(default_factory=list)
    gap_counts: list[int] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    prompt_steps: list[float] = field(default_factory=list)


class Simulation:
    """One run of a load, in the simulated device's time."""

    def __init__(self, config: Config, load: GapsLoad) -> None:
        schedule, times = config.schedule, config.simulated
        ready = Ready(
            num_pages=sum(-(-sum(each) // PAGE) for each in sorted(load.lengths, key=sum)[-load.at_once :]),
            page_size=PAGE,
            max_seqs=8192 if schedule.max_seqs == "auto" else schedule.max_seqs,
            max_context=2**31 - 1,
            vocab_size=VOCAB,
            max_tokens=32768 if schedule.max_tokens == "auto" else schedule.max_tokens,
            token_seconds=times.token_us / 1e6,
        )
        self._load = load
        self._core = make_core(ready, config)
        self._now = 1.0
        self._rank = SimulatedRank(ready, times, lambda: self._now, self._sleep)
        self._next = 0
        self._submitted: dict[int, float] = {}
        self._random = np.random.default_rng(0)
        self._num_steps = 0
        self._seen = Seen()

    def run(self, limit: str) -> GapsResult:
        """Raises BenchError when a request can never run. limit: as it was asked for, for the result."""
        core, queued, completed = self._core, deque[Step](), self._now
        for _ in range(self._load.at_once):
            self._submit()
        while True:
            for step in core.next_steps(self._now):
                queued.extend(step.passes())
            core.note_sent(self._now)
            if not queued:
                break
            step = queued.popleft()
            done = self._rank.run(step)
            core.complete(done, self._now)
            self._count(step, len(done.token_ids) // 4, self._now - completed)
            completed = self._now
            self._receive()
        seconds, seen = self._now - 1.0, self._seen
        num_tokens = sum(num_output for _, num_output in self._load.lengths)
        return GapsResult(
            load=self._load.name,
            max_step_ms=limit,
            tokens_per_second=round(num_tokens / seconds, 1),
            seconds=round(seconds, 3),
            steps=self._num_steps,
            gaps=find_percentiles(np.repeat(seen.gaps, seen.gap_counts).tolist()),
            first_token=find_percentiles(seen.firsts),
            prompt_steps=find_percentiles(seen.prompt_steps),
        )

    def _sleep(self, seconds: float) -> None:
        self._now += seconds

    def _submit(self) -> None:
        """Submits the next request, whose prompt is random so that it is no other's prefix."""
        if self._next == len(self._load.lengths):
            return
        (num_prompt, num_output), request_id = self._load.lengths[self._next], self._next
        self._next += 1
        self._submitted[request_id] = self._now
        self._core.submit(
            Submit(
                request_id=request_id,
                prompt=column(self._random.integers(0, VOCAB, num_prompt, dtype=np.int32)),
                max_tokens=num_output,
                seed=request_id,
                sampling=TokenSampling(),
                stream=self._load.stream,
            ),
            self._now,
        )

    def _count(self, step: Step, num_tokens: int, seconds: float) -> None:
        """Counts a step that came back so long after the one before; all tokens but prompts' firsts had that gap."""
        self._num_steps += 1
        self._seen.gaps.append(seconds)
        self._seen.gap_counts.append(num_tokens - int(np.count_nonzero(as_bool(step.chunk_samples))))
        if step.chunk_slots:
            self._seen.prompt_steps.append(seconds)

    def _receive(self) -> None:
        for message in self._core.take_messages():
            match message:
                case Prefills():
                    since = map(self._submitted.__getitem__, as_i32(message.request_ids).tolist())
                    self._seen.firsts += [self._now - each for each in since]
                case Tokens():
                    for _ in range(int(np.count_nonzero(as_i32(message.reasons)))):
                        self._submit()
                case Failed():
                    raise BenchError(f"request {message.request_id}: {message.message}")


def find_percentiles(seconds: Sequence[float]) -> tuple[float, ...]:
    """Finds percentiles in milliseconds; all are 0 for no values."""
    return tuple(np.percentile(np.asarray(seconds or [0.0]) * 1e3, PERCENTILES).round(2).tolist())


def format_results(results: Sequence[GapsResult]) -> list[str]:
    """Formats a table; times are in milliseconds."""
    heads = [f"{name} p{each}" for name in ("gap", "first", "step") for each in PERCENTILES]
    rows = (
        (
            f"{each.load}, max_step_ms={each.max_step_ms}",
            (each.tokens_per_second, each.steps, *chain(each.gaps, each.first_token, each.prompt_steps)),
        )
        for each in results
    )
    return format_table(("tokens/s", "steps", *heads), rows)
