"""Builds a rank's runner from a model directory and configuration: device, weights, cache, attention, warm-up.

Knows how the parts fit together; knows no processes and no sockets.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Literal, Protocol

import msgspec
import torch

from toka_async.attention.kv_cache import bytes_per_token
from toka_async.checkpoint.division import spec_of_rank, spec_of_stage, stage_parts
from toka_async.checkpoint.limits import DeviceKind, RankLimits, resolve_limits
from toka_async.checkpoint.spec import ModelSpec
from toka_async.config import AttentionConfig, CacheConfig, CompileConfig, ModelConfig, ScheduleConfig
from toka_async.model.activation_layout import LayoutPolicy
from toka_async.model.comm import Comm
from toka_async.model.decoder import Decoder
from toka_async.model.ops import Ops, TorchOps
from toka_async.model.overlap import OverlappedShards
from toka_async.model.weights import build_decoder, load_weights, random_weights
from toka_async.runner.micro_batches import most_rows, most_tokens
from toka_async.runner.pipeline import StageSetup
from toka_async.runner.runner import Runner
from toka_async.startup.cache_size import check_largest_step, fitting_limits
from toka_async.startup.described import describe_device, weight_bytes
from toka_async.startup.device import has_kernels, resolve_device, resolve_dtype, resolve_num_threads
from toka_async.startup.process_groups import StagePairs, links_of, meet
from toka_async.startup.progress import StartupProgress
from toka_async.startup.rank_coords import ALONE, RankCoords
from toka_async.startup.runner_factory import RunnerFactory
from toka_async.startup.warmup import warm_up
from toka_async.startup.weights_fit import allocating, check_weights_fit, free_bytes
from toka_async.tuning.async_tp import RankShape, build_layouts
from toka_async.tuning.store import TuningCache, folder_of, gpu_platform


class Tuning(Protocol):
    """Finds out which products with a decoder's matrices are the fastest; see `products.ProductTuning`."""

    def tune(
        self, decoder: Decoder, limits: RankLimits, max_graph_seqs: int, show: Callable[[int, int], None]
    ) -> None: ...

    def tune_layers(self, decoder: Decoder, sizes: Sequence[int]) -> None: ...


class NoTuning:
    """There is nothing to choose between."""

    def tune(self, decoder: Decoder, limits: RankLimits, max_graph_seqs: int, show: Callable[[int, int], None]) -> None:
        pass

    def tune_layers(self, decoder: Decoder, sizes: Sequence[int]) -> None:
        pass


def build_runner(
    model_dir: Path,
    spec: ModelSpec,
    model: ModelConfig,
    cache: CacheConfig,
    schedule: ScheduleConfig,
    attention: AttentionConfig,
    compiling: CompileConfig,
    progress: bool = True,
    place: RankCoords = ALONE,
    async_tp: int | Literal["auto"] = "auto",
) -> Runner:
    """A runner that is ready for its first step. Raises ModelError, which names the field and the fix.

    Ranks of one model are built at the same time: they wait for each other. async_tp: `parallel.async_tp_min_tokens`.
    """
    device = resolve_device(model, place)
    meeting = meet(place, device)
    progress = progress and place.world_rank == 0
    kind: DeviceKind = "cuda" if device.type == "cuda" else "cpu"
    limits = resolve_limits(model, schedule, spec, kind)
    part = stage_parts(spec, place.num_stages, place.size)[place.stage]
    rank_spec = spec_of_stage(spec_of_rank(spec, place.size), part)
    dtype = resolve_dtype(model, spec, device)
    check_weights_fit(spec, part, place.size, dtype, free_bytes(device, cache.memory_fraction), kind)
    stages = StartupProgress(sys.stderr, progress and kind == "cuda")
    num_parts = place.num_micro_batches
    tuning_cache = _tuning_cache(device, compiling)
    ops, tuning = _ops(device, dtype, compiling, tuning_cache)
    of_part = _of_micro_batches(limits, num_parts)
    max_graph_seqs = min(compiling.max_graph_seqs, of_part.max_seqs) if compiling.graphs else 0
    with stages.stage("tensor ranks") if place.size > 1 else nullcontext():
        shape = RankShape(spec, dtype, device, ops, of_part.max_tokens)
        layouts = build_layouts(
            async_tp,
            meeting.tensor,
            shape,
            max_graph_seqs,
            world=meeting.world,
            tune=tuning.tune_layers,
            tuning_cache=tuning_cache,
        )
    if layouts.shards is not None:
        max_graph_seqs = min(max_graph_seqs, layouts.min_tokens - 1)  # what is in shards is not captured
    with stages.stage("weights"), allocating(spec, part, place.size, dtype):
        decoder = build_decoder(spec, dtype, device, meeting.tensor, ops, layouts, part)
        _set_weights(decoder, model, model_dir, progress)
    if kind == "cpu":
        num_parameters = sum(parameter.numel() for parameter in decoder.parameters())
        torch.set_num_threads(resolve_num_threads(attention, num_parameters, place.num_sharing))
    else:
        # Only the last stage has logits.
        counted = rank_spec if part.is_last else msgspec.structs.replace(rank_spec, vocab_size=0)
        limits = least_limits(
            meeting.world, _fitting_limits(limits, counted, dtype, cache, schedule, device, num_parts)
        )
    parts = RunnerFactory(
        decoder,
        rank_spec,
        meeting,
        limits,
        cache,
        schedule,
        attention,
        compiling,
        dtype,
        device,
        tuning_cache,
        num_sharing=place.num_sharing,
        setup=_setup(meeting.pairs, spec, limits, dtype, device) if meeting.pairs is not None else None,
    )
    with stages.stage("matrices"):
        tuning.tune(decoder, _alone(_of_micro_batches(limits, num_parts), layouts), max_graph_seqs, stages.show)
    with stages.stage("memory"):
        num_pages = parts.num_pages()
    with stages.stage("attention"):
        runner = parts.runner(num_pages)
    least = runner.ready.group_min_seqs if schedule.group_min_seqs == "auto" else schedule.group_min_seqs
    _warm_up(runner, parts, stages, min(max_graph_seqs, limits.max_seqs), least > 0, num_parts)
    stages.report()
    tuning_cache.report()
    cache_bytes = (num_pages + 1) * cache.page_size * bytes_per_token(rank_spec, dtype)
    described = describe_device(place.world_rank, device, dtype, weight_bytes(decoder), cache_bytes)
    runner.ready = msgspec.structs.replace(runner.ready, ranks=(described,))
    return runner


def _warm_up(
    runner: Runner, parts: RunnerFactory, stages: StartupProgress, max_graph_seqs: int, grouped: bool, num_parts: int
) -> None:
    known = parts.graph_sizes(max_graph_seqs, grouped)
    warm_up(runner, stages, max_graph_seqs, grouped, num_parts, known)
    if runner.decode is not None and not known:
        parts.keep_graph_sizes(max_graph_seqs, grouped, runner.decode.graph_sizes)


def _set_weights(decoder: Decoder, model: ModelConfig, model_dir: Path, progress: bool) -> None:
    if model.load == "random":
        random_weights(decoder, seed=0)
    else:
        load_weights(decoder, model_dir, progress)


def _of_micro_batches(limits: RankLimits, num_parts: int) -> RankLimits:
    """The limits of each of a step's parts."""
    num_tokens = most_tokens(limits.max_seqs, limits.max_tokens, num_parts)
    return replace(limits, max_seqs=most_rows(limits.max_seqs, num_parts), max_tokens=num_tokens)


def _setup(
    pairs: StagePairs, spec: ModelSpec, limits: RankLimits, dtype: torch.dtype, device: torch.device
) -> StageSetup:
    """Of this rank's stage; its links need memory, which what measures memory must see."""
    num_parts = pairs.place.num_micro_batches
    num_tokens = most_tokens(limits.max_seqs, limits.max_tokens, num_parts)
    links = links_of(pairs, spec.hidden_size, dtype, num_tokens, limits.max_seqs)
    return StageSetup(links, num_parts, spec.hidden_size, dtype, device)


def _fitting_limits(
    limits: RankLimits,
    spec: ModelSpec,
    dtype: torch.dtype,
    cache: CacheConfig,
    schedule: ScheduleConfig,
    device: torch.device,
    num_parts: int,
) -> RankLimits:
    """The limits whose largest step fits this GPU, as far as they are automatic. Raises ModelError."""
    # What is automatic leaves half of the memory to the cache.
    share = 0.5 if "auto" in (schedule.max_seqs, schedule.max_tokens) else 1.0

    def check(tried: RankLimits) -> None:
        check_largest_step(spec, tried, dtype, cache.page_size, device, cache.memory_fraction, share, num_parts)

    return fitting_limits(limits, schedule, check)


def _tuning_cache(device: torch.device, compiling: CompileConfig) -> TuningCache:
    """On a CPU nothing is measured; on a GPU most is measured of a model that may be compiled, or tuned."""
    if device.type == "cpu":
        return TuningCache(None, {})
    computed = {"compile": [compiling.enabled, compiling.tune]}
    return TuningCache(folder_of(compiling.tuning_dir), {**gpu_platform(device), **computed})


def _ops(
    device: torch.device, dtype: torch.dtype, compiling: CompileConfig, tuning_cache: TuningCache
) -> tuple[Ops, Tuning]:
    """Fused kernels on a GPU, unless a compiler fuses."""
    if device.type == "cpu" or compiling.enabled or not has_kernels(device):
        return TorchOps(), NoTuning()
    from toka_async.tuning.gemm import ProductTuning, make_ops

    ops = make_ops(device, dtype, compiling.tune)
    return ops, ProductTuning(ops, tuning_cache)


def _alone(limits: RankLimits, layouts: LayoutPolicy) -> RankLimits:
    """The limits of products that are not part of an overlapping operation; those of sampled tokens never are."""
    if not isinstance(layouts.shards, OverlappedShards):
        return limits
    return replace(limits, max_tokens=min(limits.max_tokens, max(limits.max_seqs, layouts.min_tokens - 1)))


def least_limits(comm: Comm, limits: RankLimits) -> RankLimits:
    """What the rank with the least memory can do."""
    return replace(limits, max_seqs=comm.minimum(limits.max_seqs), max_tokens=comm.minimum(limits.max_tokens))
