"""`toka-async bench serve-load`: output tokens per second of any OpenAI-compatible server under a load.

Loads are repeated with prompts of their own each time, so that a prefix cache does not help; the run with the median
rate is reported.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from toka_async.bench.client import Reply, ServedModel, new_session, send_all, served_models
from toka_async.bench.loads import bodies, num_sequences, warm_bodies
from toka_async.bench.rate_plot import check_available, plot
from toka_async.bench.rates import Rates, counters, ours, settled, watched
from toka_async.bench.served import BenchError
from toka_async.listening import raise_limits

PERCENTILES = (50, 90, 99, 100)


class Percentiles(msgspec.Struct, frozen=True):
    """Of seconds, or of tokens per second."""

    p50: float
    p90: float
    p99: float
    max: float


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The median run, then what was asked.

    latency, first_token: seconds, of requests and until the first text of streamed ones. stream_tokens_per_second: of
    one streamed request after its first text. wasted_share: of the tokens that the server computed. server: by how
    much this engine's counters grew. runs: the rate of each run.
    """

    tokens_per_second: float
    seconds: float
    output_tokens: int
    prompt_tokens: int
    requests: int
    sequences: int
    errors: int
    first_error: str = ""
    latency: Percentiles | None = None
    first_token: Percentiles | None = None
    stream_tokens_per_second: Percentiles | None = None
    wasted_share: float | None = None
    server: dict[str, float] = {}
    runs: list[float] = []
    load: str = ""
    url: str = ""
    model: str = ""
    options: dict[str, object] = {}


def main(options: argparse.Namespace) -> int:
    """Run and print; the exit code: 1 when a request failed, 2 when the load cannot be made."""
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
        )
        if options.plot is not None:
            plot(rates[results.index(median)], options.plot)
    except BenchError as error:
        print(f"toka-async: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(msgspec.json.encode(result).decode())
    else:
        print("\n".join(f"{name:26} {value}" for name, value in msgspec.to_builtins(result).items()))
    return 1 if result.errors else 0


async def measure(options: argparse.Namespace) -> tuple[list[Result], list[Rates]]:
    """Every run, and its tokens over time when they are to be plotted."""
    url = options.url.rstrip("/").removesuffix("/v1")
    async with new_session() as session:
        served = chosen_model(await served_models(session, url), options.model)
        if options.warm:
            await send_all(session, url, warm_bodies(options, served.id, served.vocab_size), limit(options))
        results, all_rates = [], []
        for run in range(options.repeat):
            asked = bodies(options, served.id, served.vocab_size, run)
            before = await counters(session, url)
            if options.plot is None:
                seconds, replies = await send_all(session, url, asked, limit(options))
            else:
                async with watched(session, url) as rates:
                    seconds, replies = await send_all(session, url, asked, limit(options))
                all_rates.append(rates)
            grown = growth(ours(before), ours(await settled(session, url)))
            results.append(result_of(options, served.id, seconds, replies, num_sequences(asked), grown))
    return results, all_rates


def limit(options: argparse.Namespace) -> int:
    """Requests at once: all, unless the user or the load says otherwise."""
    concurrency: int | None = options.concurrency
    return concurrency or (1 if options.load == "single" else 65536)


def chosen_model(served: Sequence[ServedModel], name: str | None) -> ServedModel:
    """The one of that name, else the first."""
    if name is None:
        return served[0]
    return next((model for model in served if model.id == name), ServedModel(name))


def growth(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: round(value - before.get(name, 0.0), 4) for name, value in after.items()}


def result_of(
    options: argparse.Namespace,
    model: str,
    seconds: float,
    replies: Sequence[Reply],
    sequences: int,
    grown: dict[str, float],
) -> Result:
    good = [reply for reply in replies if not reply.error]
    output_tokens = sum(reply.output_tokens for reply in good)
    wasted, generated = grown.get("wasted_tokens_total"), grown.get("generation_tokens_total", 0.0)
    return Result(
        tokens_per_second=round(output_tokens / seconds, 1),
        seconds=round(seconds, 3),
        output_tokens=output_tokens,
        prompt_tokens=sum(reply.prompt_tokens for reply in good),
        requests=len(replies),
        sequences=sequences,
        errors=len(replies) - len(good),
        first_error=next((reply.error for reply in replies if reply.error), ""),
        latency=percentiles([reply.seconds for reply in good]),
        first_token=percentiles([reply.first for reply in good if reply.first is not None]),
        stream_tokens_per_second=percentiles([rate for reply in good if (rate := stream_rate(reply)) is not None]),
        wasted_share=None if wasted is None else round(wasted / max(generated + wasted, 1), 5),
        server=grown,
        load=options.load,
        url=options.url,
        model=model,
        options={name: shown(value) for name, value in vars(options).items() if name not in ("command", "benchmark")},
    )


def stream_rate(reply: Reply) -> float | None:
    """Tokens per second of a stream of one sequence, from its first text on."""
    if reply.n > 1 or reply.first is None or reply.last is None or reply.last <= reply.first:
        return None
    return (reply.output_tokens - 1) / (reply.last - reply.first)


def shown(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


def percentiles(values: Sequence[float]) -> Percentiles | None:
    """The nearest values, none for no values."""
    if not values:
        return None
    ordered = sorted(values)
    return Percentiles(*(round(ordered[min(len(ordered) * p // 100, len(ordered) - 1)], 4) for p in PERCENTILES))
