"""`toka-async bench step`: times one rank's steps by rows and context, and their share of the floor.

The rank is the ordinary one, built from the configuration in this process, without scheduler and server. Steps are
launched ahead as the scheduler does, so that a step's time is the time between results.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import msgspec

from toka_async.bench.loads.served import BenchError
from toka_async.bench.policy.policy_plot import check_available
from toka_async.bench.step_load import Case, DecodeSteps, DoesNotFitError, PromptSteps
from toka_async.bench.step_result import StepResult, StepTime
from toka_async.checkpoint.hub import resolve_model
from toka_async.checkpoint.implementation import read_model
from toka_async.checkpoint.spec import ModelError
from toka_async.config import Config, load_config
from toka_async.messages import Ready, Step, StepDone, TokenSampling

if TYPE_CHECKING:
    from toka_async.bench.floor import Floor
    from toka_async.runner.results import LaunchedStep
    from toka_async.runner.runner import Runner

AHEAD = 2  # steps queued behind the awaited one
UNTIMED = 3  # first steps of a case; the last AHEAD, without steps queued behind them, are not timed either


def main(options: argparse.Namespace) -> int:
    """Runs and prints; returns the exit code. Raises ConfigError for a wrong override."""
    config = load_config(overrides=options.overrides)
    try:
        if options.plot is not None:
            check_available()
        result = measure(options, config)
        if options.plot is not None:
            from toka_async.bench.step_plot import plot

            plot(result, options.plot)
    except (BenchError, ModelError) as error:
        print(f"toka-async: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(msgspec.json.encode(result).decode() if options.json else "\n".join(table(result)))
    return 0


def measure(options: argparse.Namespace, config: Config) -> StepResult:
    """Raises ModelError when the rank cannot be built, BenchError when it computes nothing."""
    if config.model.device == "simulated":
        raise BenchError("model.device=simulated: computes nothing; use cpu or cuda")
    for name in ("pp", "tp", "ep"):
        if (size := getattr(config.parallel, name)) > 1:
            raise BenchError(f"parallel.{name}={size}: one rank alone is measured; use 1")
    model_dir = resolve_model(config.model.path, weights=config.model.load == "weights")
    spec = read_model(model_dir, config.model, config.parallel).store_states(config.cache.state_dtype)
    # A rank's process does this too, before torch loads.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    from toka_async.bench.floor import Floor
    from toka_async.startup.device import name_types, resolve_dtype, resolve_stored_dtype
    from toka_async.startup.progress import StartupProgress
    from toka_async.startup.runner_factory import RunnerFactory

    runner = RunnerFactory(model_dir, spec, config, stages=StartupProgress()).build()
    dtype = resolve_dtype(config.model, spec, runner.device)
    floor = Floor(spec, dtype, resolve_stored_dtype(config.cache, dtype), runner.device)
    times, skipped = [], []
    for case in cases(options, runner.ready):
        try:
            times.append(time_case(case, options, config, runner, floor))
        except DoesNotFitError as error:
            skipped.append(f"{describe_case(case)}: {error}")
    return StepResult(
        model=config.model.path,
        device=device_name(runner),
        dtype=name_types(spec, dtype, config.cache),
        cache_tokens=runner.ready.num_pages * runner.ready.page_size,
        state_bytes=spec.count_state_bytes(dtype.itemsize),
        bandwidth_gb_s=round(floor.bandwidth / 1e9, 1),
        matrix_tflops=round(floor.flops / 1e12, 2),
        steps=times,
        skipped=skipped,
    )


def cases(options: argparse.Namespace, ready: Ready) -> Iterator[Case]:
    """Yields every combination of the options; a prefix is whole pages, and shorter than the context."""
    prefixes = dict.fromkeys(prefix // ready.page_size * ready.page_size for prefix in options.shared_prefix)
    kinds = itertools.product(options.context, prefixes, options.sampling, options.rows)
    for context, prefix, sampling, rows in kinds:
        if prefix < context:
            groups = min(options.groups, rows) if prefix else 0
            asking = 0 if sampling == "plain" else min(options.asking or rows, rows)
            yield Case(rows, context, prefix, groups, sampling=sampling, asking=asking)
    for length in options.prompt:
        yield Case(prompt=length)


def time_case(case: Case, options: argparse.Namespace, config: Config, runner: Runner, floor: Floor) -> StepTime:
    sampling = TokenSampling(
        temperature=options.temperature, top_p=options.top_p, num_logprobs=0 if options.logprobs else -1
    )
    grouped = wants_groups(case, config, runner.ready)
    load: DecodeSteps | PromptSteps
    if case.prompt:
        load = PromptSteps(case, runner.ready, sampling)
    else:
        load = DecodeSteps(case, runner.ready, sampling, UNTIMED + options.steps + AHEAD + 1, grouped)
    for step in load.prepare():
        runner.run(step)
    ms, device_ms = time_steps(runner, (load.step() for _ in range(UNTIMED + options.steps + AHEAD)))
    runner.run(load.end())
    parts = floor.compute(case, grouped)
    return StepTime(
        rows=case.rows,
        context=case.context,
        prefix=case.prefix,
        groups=case.groups if grouped else 0,
        prompt=case.prompt,
        sampling=case.sampling,
        asking=case.asking,
        ms=round(ms, 4),
        device_ms=round(device_ms, 4),
        tokens_per_second=round(case.num_tokens / ms * 1000, 1),
        floor_ms=round(parts.total * 1000, 4),
        matrices_ms=round(parts.matrices * 1000, 4),
        attention_ms=round(parts.attention * 1000, 4),
        states_ms=round(parts.states * 1000, 4),
        sampling_ms=round(parts.sampling * 1000, 4),
        share=round(parts.total * 1000 / ms, 4),
        torch_ms=round(parts.total_by_torch * 1000, 4),
        torch_share=round(parts.total_by_torch * 1000 / ms, 4),
    )


def time_steps(runner: Runner, steps: Iterable[Step]) -> tuple[float, float]:
    """Returns median milliseconds between results, and as the rank measures, without the first and last steps."""
    launched, results, times = deque["LaunchedStep"](), list[StepDone](), list[float]()

    def collect() -> None:
        results.append(launched.popleft().collect())
        times.append(time.perf_counter())

    for step in steps:
        launched.append(runner.launch(step))
        if len(launched) > AHEAD:
            collect()
    while launched:
        collect()
    between = [after - before for before, after in itertools.pairwise(times[UNTIMED - 1 : -AHEAD])]
    inside = [done.seconds for done in results[UNTIMED:-AHEAD]]
    return statistics.median(between) * 1000, statistics.median(inside) * 1000


def wants_groups(case: Case, config: Config, ready: Ready) -> bool:
    """Tells whether the scheduler would make groups of the case's rows."""
    if not case.groups:
        return False
    least = ready.group_min_seqs if config.schedule.group_min_seqs == "auto" else config.schedule.group_min_seqs
    tokens = ready.group_min_tokens if config.schedule.group_min_tokens == "auto" else config.schedule.group_min_tokens
    return 0 < least <= case.rows // case.groups and case.prefix >= tokens


def describe_case(case: Case) -> str:
    if case.prompt:
        return f"prompt {case.prompt}"
    shared = f", {case.prefix} shared" if case.prefix else ""
    asking = f", {case.asking} asking for {case.sampling}" if case.asking else ""
    return f"{case.rows} rows, context {case.context}{shared}{asking}"


def device_name(runner: Runner) -> str:
    import torch

    return torch.cuda.get_device_name(runner.device) if runner.device.type == "cuda" else "cpu"


def table(result: StepResult) -> Iterator[str]:
    states = f", {result.state_bytes / (1 << 20):.1f} MiB of states a row" if result.state_bytes else ""
    yield (
        f"{result.model} on {result.device}, {result.dtype}, cache of {result.cache_tokens} tokens{states}; "
        f"measured: {result.bandwidth_gb_s} GB/s, matrices {result.matrix_tflops} TFLOP/s"
    )
    kinds = ("rows", "context", "prefix", "groups", "prompt", "sampling", "asking")
    figures = ("ms", "device_ms", "tokens/s", "floor_ms", "share", "torch_ms", "torch_share")
    yield "".join(f"{name:>12}" for name in (*kinds, *figures))
    for each in result.steps:
        values = (each.rows, each.context, each.prefix, each.groups, each.prompt, each.sampling, each.asking)
        measured = (f"{each.ms:.3f}", f"{each.device_ms:.3f}", f"{each.tokens_per_second:.0f}")
        floors = (f"{each.floor_ms:.3f}", f"{each.share:.1%}", f"{each.torch_ms:.3f}", f"{each.torch_share:.1%}")
        yield "".join(f"{value:>12}" for value in (*values, *measured, *floors))
    for line in result.skipped:
        yield f"skipped: {line}"
