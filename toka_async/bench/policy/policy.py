"""`toka-async bench policy`: compares admission policies on the same lengths, in simulated time.

The real scheduler runs its own policy, two simple ones, and one that knows all lengths beforehand.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import numpy.typing as npt

from toka_async.arrays import Float64
from toka_async.bench.loads.lengths import Workload, chat, divide, gsm8k, read_lengths, rollouts
from toka_async.bench.loads.served import BenchError
from toka_async.bench.policy.baselines import Oracle, Reserving
from toka_async.bench.policy.replay import VOCAB, Outcome, Replay, StepCost
from toka_async.messages import Ready
from toka_async.scheduler.admission.lookahead import LookAhead
from toka_async.scheduler.admission.policy import Admission, UntilFull
from toka_async.scheduler.sequences.running import RunningSet

STEP_TOKENS = 32768
KINDS = {
    "gsm8k": (gsm8k, 32, 512),
    "chat": (chat, 16384, 1),
    "rollouts": (rollouts, 256, 16),
}  # (function that draws, requests, samples of each)
FORECASTS = 100  # steps between two forecasts that are plotted


class PolicyResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one policy.

    cache_use: share of the pages in use while work waited for pages (a slot was free); null: rows were the limit.
    limited_share: share of the time in which work so waited. recomputed_share, wasted_share: of all tokens computed.
    seconds: simulated, until the last sequence ended.
    """

    cache_use: float | None
    limited_share: float
    recomputed_share: float
    wasted_share: float
    seconds: float
    preemptions: int
    steps: int


class OrderResult(msgspec.Struct, frozen=True, kw_only=True):
    """When work ended under our own policy, in simulated seconds: percentiles 50, 90, 99 and 100.

    samples: of sequences. groups: of requests with all their sequences, or of what was one request before.
    """

    samples: tuple[float, float, float, float]
    groups: tuple[float, float, float, float]


class PolicyComparison(msgspec.Struct, frozen=True, kw_only=True):
    lookahead: PolicyResult
    oracle: PolicyResult
    until_full: PolicyResult
    reserving: PolicyResult
    sequences: int
    output_tokens: int
    cache_tokens: int
    orders: dict[str, OrderResult] = {}  # by the order in which samples of one prompt come


def main(options: argparse.Namespace) -> int:
    try:
        if options.plot is not None:
            from toka_async.bench.policy.policy_plot import check_available

            check_available()
        result = compare(options, _workload(options))
    except BenchError as error:
        print(f"toka-async: {error}", file=sys.stderr)
        return 2
    print(msgspec.json.encode(result).decode() if options.json else "\n".join(_table(result)))
    return 0


def compare(options: argparse.Namespace, work: Workload) -> PolicyComparison:
    """Runs every policy on the workload. Raises BenchError when a request needs more than the cache holds."""
    ahead = options.steps_ahead
    ready = Ready(
        num_pages=options.cache_tokens // options.page_size,
        page_size=options.page_size,
        max_seqs=options.max_seqs,
        max_context=2**31 - 1,
        vocab_size=VOCAB,
        max_tokens=max(STEP_TOKENS, options.max_seqs),
    )
    cost = StepCost(options.base_us / 1e6, options.row_us / 1e6, options.prompt_token_us / 1e6)
    seen: list[LookAhead] = []

    def lookahead(running: RunningSet) -> LookAhead:
        seen.append(LookAhead(running))
        return seen[-1]

    def forecast() -> Float64:
        return seen[-1].usage()

    def run(policy: Callable[[RunningSet], Admission], look: Callable[[], Float64] | None = None) -> Outcome:
        return Replay(work, ready, policy, steps_ahead=ahead, cost=cost, look=look, look_every=FORECASTS).run()

    ours = run(lookahead, forecast if options.plot is not None else None)
    if options.plot is not None:
        from toka_async.bench.policy.policy_plot import plot

        plot(ours, ready.num_pages, cast(Path, options.plot))
    outcomes = {
        "lookahead": ours,
        "oracle": run(lambda running: Oracle(running, work, ahead)),
        "until_full": run(UntilFull),
        "reserving": run(Reserving),
    }
    orders = {}
    if work.samples.max(initial=0) > 1:
        orders["n samples of a request"] = _order(ours, np.arange(work.samples.size))
        for name, interleaved in (("requests by prompt", False), ("requests in turns", True)):
            apart, groups = divide(work, interleaved=interleaved)
            orders[name] = _order(Replay(apart, ready, LookAhead, steps_ahead=ahead, cost=cost).run(), groups)
    return PolicyComparison(
        orders=orders,
        sequences=work.output_tokens.size,
        output_tokens=work.num_output_tokens,
        cache_tokens=ready.num_pages * ready.page_size,
        **{name: _result(outcome, ready.num_pages) for name, outcome in outcomes.items()},
    )


def _workload(options: argparse.Namespace) -> Workload:
    if options.trace is not None:
        return read_lengths(options.trace)
    draw, requests, samples = KINDS[options.kind]
    return draw(options.requests or requests, options.samples or samples, options.seed)


def _result(outcome: Outcome, num_pages: int) -> PolicyResult:
    stats = outcome.stats
    computed = stats.prompt_tokens + stats.generated_tokens + stats.wasted_tokens
    use = outcome.cache_use(num_pages)
    return PolicyResult(
        cache_use=None if use is None else round(use, 4),
        limited_share=round(outcome.limited / outcome.seconds, 4) if outcome.seconds else 0.0,
        recomputed_share=round(stats.recomputed_tokens / computed, 5),
        wasted_share=round(stats.wasted_tokens / computed, 5),
        seconds=round(outcome.seconds, 3),
        preemptions=stats.num_preemptions,
        steps=stats.num_steps,
    )


def _order(outcome: Outcome, groups: npt.NDArray[np.integer]) -> OrderResult:
    """groups: of each request."""
    ends: dict[int, float] = {}
    for request, group in enumerate(groups.tolist()):
        ends[group] = max(ends.get(group, 0.0), outcome.ends[request])
    return OrderResult(samples=_percentiles(outcome.all_ends), groups=_percentiles(list(ends.values())))


def _percentiles(values: Sequence[float]) -> tuple[float, float, float, float]:
    p50, p90, p99, most = np.percentile(values, (50, 90, 99, 100)).round(2).tolist()
    return p50, p90, p99, most


def _table(result: PolicyComparison) -> list[str]:
    lines = [f"{result.sequences} sequences, {result.output_tokens} tokens, cache of {result.cache_tokens} tokens"]
    lines.append(f"{'policy':12}{'cache use':>10}{'recomputed':>12}{'wasted':>9}{'seconds':>10}{'preemptions':>13}")
    for name in ("lookahead", "oracle", "until_full", "reserving"):
        row: PolicyResult = getattr(result, name)
        use = "-" if row.cache_use is None else f"{row.cache_use:.1%}"
        lines.append(
            f"{name:12}{use:>10}{row.recomputed_share:>12.2%}{row.wasted_share:>9.2%}"
            f"{row.seconds:>10.2f}{row.preemptions:>13}"
        )
    if result.orders:
        lines.append(f"{'ended, seconds':32}{'p50':>9}{'p90':>9}{'p99':>9}{'all':>9}")
    for name, order in result.orders.items():
        for what, values in (("samples", order.samples), ("groups", order.groups)):
            lines.append(f"{f'{name}, {what}':32}" + "".join(f"{value:>9.2f}" for value in values))
    return lines
