"""`toka-async bench serve-load`: output tokens per second of any OpenAI-compatible server under a load.

Repeats the load with new prompts each time, so that a prefix cache does not help, and reports the run with the median
rate.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec

from toka_async.bench.client import ListedModel, Reply, Sent, fetch_served_models, open_session, send_all
from toka_async.bench.loads.served import BenchError
from toka_async.bench.loads.workloads import (
    ROLLOUT_SAMPLES,
    Body,
    build_bodies,
    build_probe_bodies,
    build_warm_bodies,
    num_sequences,
)
from toka_async.bench.progress import LoadBar
from toka_async.bench.rate_plot import check_available, plot
from toka_async.bench.rates import Rates, counters, select_ours, sum_generated, wait_for_counters, watch_rates
from toka_async.bench.report import format_line, format_number, format_table
from toka_async.listening import raise_limits

PERCENTILES = (50, 90, 99, 100)
LEAST_SAMPLES, MOST_SAMPLES = 16, 1024  # bounds of the samples of each prompt where no number is given
FITTING_SECONDS = 30.0


class LoadPercentiles(msgspec.Struct, frozen=True):
    """Percentiles of seconds, or of tokens per second."""

    p50: float
    p90: float
    p99: float
    max: float


class ServeLoadResult(msgspec.Struct, frozen=True, kw_only=True):
    """The median run, then its options.

    latency, first_token: seconds, of requests and until the first text of streamed ones. sample_ends, group_ends: of
    rollouts, seconds from the begin until a share of the samples has ended, and of the prompts with all of their
    samples. stream_tokens_per_second: the rate of one streamed request after its first text. wasted_share: share of the
    tokens that the server computed. server: growth of this engine's counters. runs: the rate of each run. ended:
    requests, failed ones included.
    """

    tokens_per_second: float
    seconds: float
    output_tokens: int
    prompt_tokens: int
    requests: int
    sequences: int
    errors: int
    ended: int = 0
    interrupted: bool = False
    first_error: str = ""
    latency: LoadPercentiles | None = None
    first_token: LoadPercentiles | None = None
    sample_ends: LoadPercentiles | None = None
    group_ends: LoadPercentiles | None = None
    stream_tokens_per_second: LoadPercentiles | None = None
    wasted_share: float | None = None
    server: dict[str, float] = {}
    runs: list[float] = []
    load: str = ""
    url: str = ""
    model: str = ""
    options: dict[str, object] = {}


def main(options: argparse.Namespace) -> int:
    """Runs and prints; the exit code is 1 when a request failed, 2 for a bad load, 130 after Ctrl-C."""
    try:
        if options.plot is not None:
            check_available()
        raise_limits()
        results, rates = asyncio.run(measure(options))
        median = sorted(results, key=lambda result: result.tokens_per_second)[(len(results) - 1) // 2]
        result = msgspec.structs.replace(
            median,
            runs=[each.tokens_per_second for each in results],
            errors=sum(each.errors for each in results),
            first_error=next((each.first_error for each in results if each.first_error), ""),
            interrupted=results[-1].interrupted,
        )
        if options.plot is not None:
            plot(rates[results.index(median)], options.plot)
    except BenchError as error:
        print(f"toka-async: {error}", file=sys.stderr)
        return 2
    print(msgspec.json.encode(result).decode() if options.json else "\n".join(read_lines(result)))
    return 130 if result.interrupted else 1 if result.errors else 0


async def measure(options: argparse.Namespace) -> tuple[list[ServeLoadResult], list[Rates]]:
    """Returns every run, and its tokens over time if they are to be plotted. Ctrl-C ends the last run early."""
    url = options.url.rstrip("/").removesuffix("/v1")
    async with open_session() as session:
        served = choose_model(await fetch_served_models(session, url), options.model)
        if options.samples is None:
            options.samples = ROLLOUT_SAMPLES if options.load == "rollouts" else MOST_SAMPLES
            if options.load in ("samples", "ends"):
                options.samples = await fit_samples(options, session, url, served)
        if options.warm:
            asked = build_warm_bodies(options, served.id, served.vocab_size)
            await send_whole(session, url, asked, choose_concurrency(options), "warming up")
        results, all_rates = [], []
        for run in range(options.repeat):
            asked = build_bodies(options, served.id, served.vocab_size, run)
            before = await counters(session, url)
            label = f"run {run + 1} of {options.repeat}" if options.repeat > 1 else "running"
            async with AsyncExitStack() as stack:
                bar = LoadBar(sys.stderr, label, len(asked), num_tokens(options, asked))
                await stack.enter_async_context(show_progress(bar, session, url, sum_generated(before)))
                if options.plot is not None:
                    all_rates.append(await stack.enter_async_context(watch_rates(session, url)))
                sent = await send_all(session, url, asked, choose_concurrency(options), bar.count_ended)
            after = await wait_for_counters(session, url)
            results.append(make_result(options, served.id, sent, asked, before, after))
            if sent.is_interrupted:
                break
    return results, all_rates


async def fit_samples(
    options: argparse.Namespace, session: aiohttp.ClientSession, url: str, served: ListedModel
) -> int:
    """Returns how many samples of each prompt take about FITTING_SECONDS: a power of two.

    A small load tells the rate. Raises BenchError when that load fails.
    """
    asked = build_probe_bodies(options, served.id, served.vocab_size)
    sent = await send_whole(session, url, asked, choose_concurrency(options), "measuring how much fits")
    if error := next((reply.error for reply in sent.replies if reply.error), ""):
        raise BenchError(error)
    rate = sum(reply.output_tokens for reply in sent.replies) / sent.seconds
    of_one = options.prompts * (options.mean_tokens if options.load == "ends" else options.output_tokens or 192)
    samples = MOST_SAMPLES
    while samples > LEAST_SAMPLES and samples // 2 * of_one >= rate * FITTING_SECONDS:
        samples //= 2
    note = f"{options.prompts} prompts x {samples} samples, by {rate:,.0f} tokens/s of a small load; --samples sets it"
    print(f"toka-async: {note}", file=sys.stderr)
    return samples


async def send_whole(
    session: aiohttp.ClientSession, url: str, asked: Sequence[Body], concurrency: int, label: str
) -> Sent:
    """Sends a load that is not measured; Ctrl-C cancels, because nothing is to be reported."""
    bar = LoadBar(sys.stderr, label, len(asked), None)
    async with show_progress(bar, session, url, sum_generated(await counters(session, url))):
        sent = await send_all(session, url, asked, concurrency, bar.count_ended)
    if sent.is_interrupted:
        raise asyncio.CancelledError
    return sent


def num_tokens(options: argparse.Namespace, asked: Sequence[Body]) -> int | None:
    """Returns the tokens that the load will generate; None if samples may end by themselves."""
    if options.load == "ends" or options.stop:
        return None
    return sum(int(body["n"]) * int(body["max_tokens"]) for body in asked)


@asynccontextmanager
async def show_progress(
    bar: LoadBar, session: aiohttp.ClientSession, url: str, tokens_before: float | None
) -> AsyncIterator[None]:
    """Redraws the bar inside the context, with the server's count of tokens if it has one."""

    async def follow() -> None:
        while True:
            await asyncio.sleep(bar.interval)
            tokens = sum_generated(await counters(session, url))
            bar.show(None if tokens is None or tokens_before is None else tokens - tokens_before)

    bar.show(None if tokens_before is None else 0)
    task = asyncio.create_task(follow())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        bar.close()


def choose_concurrency(options: argparse.Namespace) -> int:
    """Returns how many requests run at once: all, unless the user or the load says otherwise."""
    concurrency: int | None = options.concurrency
    return concurrency or (1 if options.load == "single" else 65536)


def choose_model(served: Sequence[ListedModel], name: str | None) -> ListedModel:
    """Returns the model of that name, else the first."""
    if name is None:
        return served[0]
    return next((model for model in served if model.id == name), ListedModel(name))


def growth(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: round(value - before.get(name, 0.0), 4) for name, value in after.items()}


def make_result(
    options: argparse.Namespace,
    model: str,
    sent: Sent,
    asked: Sequence[Body],
    before: dict[str, float],
    after: dict[str, float],
) -> ServeLoadResult:
    """before, after: the server's counters, which also tell the tokens of an interrupted load."""
    good = [reply for reply in sent.replies if not reply.error]
    output_tokens = sum(reply.output_tokens for reply in good)
    begun, ended = sum_generated(before), sum_generated(after)
    if sent.is_interrupted and begun is not None and ended is not None:
        output_tokens = round(ended - begun)
    grown = growth(select_ours(before), select_ours(after))
    wasted, num_generated = grown.get("wasted_tokens_total"), grown.get("generation_tokens_total", 0.0)
    return ServeLoadResult(
        tokens_per_second=round(output_tokens / sent.seconds, 1),
        seconds=round(sent.seconds, 3),
        output_tokens=output_tokens,
        prompt_tokens=sum(reply.prompt_tokens for reply in good),
        requests=len(asked),
        ended=len(sent.replies),
        sequences=num_sequences(asked),
        errors=len(sent.replies) - len(good),
        interrupted=sent.is_interrupted,
        first_error=next((reply.error for reply in sent.replies if reply.error), ""),
        latency=percentiles([reply.seconds for reply in good]),
        first_token=percentiles([reply.first for reply in good if reply.first is not None]),
        sample_ends=percentiles([reply.ended_at for reply in good] if options.load == "rollouts" else []),
        group_ends=percentiles(find_group_ends(sent, asked) if options.load == "rollouts" else []),
        stream_tokens_per_second=percentiles([rate for reply in good if (rate := stream_rate(reply)) is not None]),
        wasted_share=None if wasted is None else round(wasted / max(num_generated + wasted, 1), 5),
        server=grown,
        load=options.load,
        url=options.url,
        model=model,
        options={name: plain(value) for name, value in vars(options).items() if name not in ("command", "benchmark")},
    )


def find_group_ends(sent: Sent, asked: Sequence[Body]) -> list[float]:
    """Returns when each prompt's last sample had ended; none where a reply is missing."""
    if len(sent.replies) != len(asked):
        return []
    ends: dict[str, float] = {}
    for body, reply in zip(asked, sent.replies, strict=True):
        ends[body["prompt"]] = max(ends.get(body["prompt"], 0.0), reply.ended_at)
    return list(ends.values())


def read_lines(result: ServeLoadResult) -> list[str]:
    """Formats the main figures for people; `--json` has all."""
    lines = [
        format_line("model", f"{result.model} at {result.url}"),
        format_line("load", f"{result.load}: {result.requests:,} requests, {result.sequences:,} sequences"),
        format_line("tokens/s", result.tokens_per_second),
        *([format_line("of each run", result.runs)] if len(result.runs) > 1 else []),
        format_line("seconds", result.seconds),
        format_line("output tokens", result.output_tokens),
        format_line("prompt tokens", result.prompt_tokens),
    ]
    if result.interrupted:
        lines.append(format_line("interrupted", f"{result.ended:,} of {result.requests:,} requests had ended"))
    if result.errors:
        lines.append(format_line("errors", f"{result.errors:,}, the first: {result.first_error}"))
    server = result.server
    if queries := server.get("prefix_cache_queries_total"):
        lines.append(
            format_line("prompt tokens saved", f"{server['prefix_cache_hits_total'] / queries:.1%} of all samples'")
        )
    if result.wasted_share is not None:
        lines.append(format_line("tokens after the end", f"{result.wasted_share:.2%} of those computed"))
    if steps := server.get("steps_total"):
        lines.append(
            format_line(
                "steps", f"{format_number(steps)} of {format_number(server['step_seconds_total'] / steps * 1000)} ms"
            )
        )
        lines.append(format_line("preemptions", server["num_preemptions_total"]))
    rows = {
        "latency, s": result.latency,
        "samples ended, s": result.sample_ends,
        "whole groups ended, s": result.group_ends,
        "first text, s": result.first_token,
        "tokens/s of a stream": result.stream_tokens_per_second,
    }
    found = [(name, (each.p50, each.p90, each.p99, each.max)) for name, each in rows.items() if each is not None]
    return [*lines, *format_table(("p50", "p90", "p99", "max"), found)]


def stream_rate(reply: Reply) -> float | None:
    """Returns the tokens per second of a stream of one sequence, from its first text on."""
    if reply.n > 1 or reply.first is None or reply.last is None or reply.last <= reply.first:
        return None
    return (reply.output_tokens - 1) / (reply.last - reply.first)


def plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


def percentiles(values: Sequence[float]) -> LoadPercentiles | None:
    """Returns the nearest values; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    return LoadPercentiles(*(round(ordered[min(len(ordered) * p // 100, len(ordered) - 1)], 4) for p in PERCENTILES))
