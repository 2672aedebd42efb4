"""`toka-async bench control-plane`: times everything but the model, from the first send to the last byte.

The server, scheduler and rank are the ordinary ones with the built-in tokenizer; the rank's model is simulated. Checks
every answer.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence

import msgspec

from toka_async.bench.load import LoadResult, LoadShape, run_apart
from toka_async.bench.loads.served import BenchError, Served, serve
from toka_async.bench.report import format_line
from toka_async.checkpoint.hub import resolve_model
from toka_async.checkpoint.spec import read_spec
from toka_async.config import load_config

PAGE = 16  # tokens of a cache page by default
SLACK = 1.1  # cache size as a multiple of what sequences need, so that rows are the limit
SETTLE = 10.0  # seconds for the scheduler's last counters to arrive


class Percentiles(msgspec.Struct, frozen=True):
    p50: float
    p99: float
    max: float


class ControlPlaneResult(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements, then the parameters.

    scheduler_us_per_step: CPU time of the scheduler. forecast_us: time of a forecast; null without any.
    server_us_per_1000_tokens: CPU time of the server's process. bytes_per_token: size of the HTTP bodies received.
    wasted_tokens: computed after an end that was found late. cpu_seconds: by process. load_average: the machine's at
    the start.
    """

    tokens_per_second: float
    scheduler_us_per_step: Percentiles | None
    forecast_us: Percentiles | None
    server_us_per_1000_tokens: float
    bytes_per_token: float
    tokens: int
    stopped: int
    steps: int
    wasted_tokens: int
    preemptions: int
    seconds: float
    cpu_seconds: dict[str, float]
    load_average: float
    sequences: int
    samples: int
    connections: int
    waves: int
    prompt_tokens: int
    output_tokens: int
    stream: bool
    stop: list[str]
    logprobs: int | None
    step_ms: float
    end_rate: float


def main(options: argparse.Namespace) -> int:
    try:
        result = measure(options)
    except BenchError as error:
        print(f"toka-async: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(msgspec.json.encode(result).decode())
    else:
        print(
            "\n".join(format_line(name.replace("_", " "), value) for name, value in msgspec.to_builtins(result).items())
        )
    return 0


def measure(options: argparse.Namespace) -> ControlPlaneResult:
    """Raises BenchError, or ConfigError for a wrong override."""
    connections = options.connections or max(1, options.sequences // options.samples)
    overrides = server_overrides(options, connections)
    config = load_config(overrides=overrides)
    load_average = os.getloadavg()[0]
    with serve(overrides) as served:
        load = LoadShape(
            url=served.url,
            model=config.model.served_name or config.model.path,
            connections=connections,
            waves=options.waves,
            samples=options.samples,
            prompt_tokens=options.prompt_tokens,
            output_tokens=options.output_tokens,
            vocab_size=read_spec(resolve_model(config.model.path, weights=False)).vocab_size,
            stream=options.stream,
            stop=options.stop,
            logprobs=options.logprobs,
        )
        before = served.cpu_seconds()
        done = run_apart(load)
        cpu = {name: seconds - before[name] for name, seconds in served.cpu_seconds().items()}
        metrics = wait_for_counts(served, done.num_tokens, exact=not options.stop)
    return make_result(options, load, done, cpu | {"client": done.cpu_seconds}, metrics, load_average)


def server_overrides(options: argparse.Namespace, connections: int) -> Sequence[str]:
    """Returns the server's configuration; the user's overrides come last and so take precedence."""
    context = options.prompt_tokens + options.output_tokens
    own = PAGE * (-(-options.output_tokens // PAGE) + 2)
    prompts = max(connections, options.sequences // options.samples) * (options.prompt_tokens + PAGE)
    return [
        "model.path=demo",
        "model.device=simulated",
        f"model.max_context={max(2048, context)}",
        f"simulated.step_ms={options.step_ms}",
        f"simulated.end_rate={options.end_rate}",
        f"schedule.max_seqs={options.sequences}",
        f"cache.num_tokens={int(SLACK * (options.sequences * own + 2 * prompts))}",
        "log.stats_interval=0",
        f"limits.max_n={max(16384, options.samples)}",
        *options.overrides,
    ]


def wait_for_counts(served: Served, num_tokens: int, exact: bool) -> dict[str, float]:
    """Waits until the scheduler's counters have all tokens, or more unless `exact`; returns the metrics.

    Raises BenchError when the counters stay below the tokens that the client received.
    """
    deadline = time.monotonic() + SETTLE
    while True:
        metrics = served.metrics()
        counted = metrics["toka:generation_tokens_total"]
        if (counted == num_tokens or (counted > num_tokens and not exact)) and not metrics["toka:num_requests_running"]:
            return metrics
        if time.monotonic() > deadline:
            raise BenchError(f"the client received {num_tokens} tokens, the scheduler counted {counted:.0f}")
        time.sleep(0.05)


def make_result(
    options: argparse.Namespace,
    load: LoadShape,
    done: LoadResult,
    cpu: dict[str, float],
    metrics: dict[str, float],
    load_average: float,
) -> ControlPlaneResult:
    return ControlPlaneResult(
        tokens_per_second=round(done.num_tokens / done.seconds, 1),
        scheduler_us_per_step=percentiles(metrics, "scheduler_microseconds"),
        forecast_us=percentiles(metrics, "forecast_microseconds"),
        server_us_per_1000_tokens=round(cpu["server"] * 1e9 / done.num_tokens, 1),
        bytes_per_token=round(done.num_bytes / done.num_tokens, 2),
        tokens=done.num_tokens,
        stopped=done.num_stopped,
        steps=int(metrics["toka:steps_total"]),
        wasted_tokens=int(metrics["toka:wasted_tokens_total"]),
        preemptions=int(metrics["toka:num_preemptions_total"]),
        seconds=round(done.seconds, 3),
        cpu_seconds={name: round(seconds, 3) for name, seconds in cpu.items()},
        load_average=round(load_average, 2),
        sequences=options.sequences,
        samples=load.samples,
        connections=load.connections,
        waves=load.waves,
        prompt_tokens=load.prompt_tokens,
        output_tokens=load.output_tokens,
        stream=load.stream,
        stop=load.stop,
        logprobs=load.logprobs,
        step_ms=options.step_ms,
        end_rate=options.end_rate,
    )


def percentiles(metrics: dict[str, float], name: str) -> Percentiles | None:
    """Returns what the scheduler reports; None without a report."""
    values = [metrics.get(f'toka:{name}{{quantile="{quantile}"}}') for quantile in ("0.5", "0.99", "1.0")]
    return None if None in values else Percentiles(*[value for value in values if value is not None])
