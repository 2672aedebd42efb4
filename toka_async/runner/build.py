"""Builds a rank's runner from a model directory and configuration: device, weights, cache, attention, warm-up.

Knows how the parts fit together; knows no processes and no sockets.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import msgspec
import torch
from torch import nn

from toka_async.attention.build import NOT_MEASURED, Attention, build_attention
from toka_async.attention.choice import Table
from toka_async.attention.kv_cache import KVCache
from toka_async.config import AttentionConfig, CacheConfig, CompileConfig, ModelConfig, ScheduleConfig
from toka_async.messages import Ready
from toka_async.model.comm import Comm
from toka_async.model.decoder import Decoder
from toka_async.model.division import spec_of_rank, spec_of_stage, stage_parts
from toka_async.model.ops import Ops, TorchOps
from toka_async.model.overlap import OverlappedShards
from toka_async.model.spec import ModelError, ModelSpec
from toka_async.model.spread import Spreads
from toka_async.model.weights import build_decoder, load_weights, random_weights
from toka_async.runner.cache_size import (
    check_largest_step,
    does_not_fit,
    fitting_limits,
    memory_for_cache,
    page_bytes_of,
    pages_for_trial,
)
from toka_async.runner.limits import DeviceKind, Limits, resolve_limits, resolve_num_pages
from toka_async.runner.meeting import Meeting, Pairs, links_of, meet
from toka_async.runner.memory import available_memory
from toka_async.runner.micro_batches import most_rows, most_tokens
from toka_async.runner.pipeline import StageSetup
from toka_async.runner.place import ALONE, Place
from toka_async.runner.row_shares import RowShares
from toka_async.runner.runner import Runner
from toka_async.runner.spreads import RankShape, build_spreads
from toka_async.runner.stages import Stages
from toka_async.runner.warmup import largest_load, warm_up

_AUTO_CPU_SHARE = 0.25
_MOST_CPU_SHARE = 0.9
_SMALL_PARAMETERS = 10_000_000


def build_runner(
    model_dir: Path,
    spec: ModelSpec,
    model: ModelConfig,
    cache: CacheConfig,
    schedule: ScheduleConfig,
    attention: AttentionConfig,
    compiling: CompileConfig,
    progress: bool = True,
    place: Place = ALONE,
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
    stages = Stages(sys.stderr, progress and kind == "cuda")
    num_parts = place.num_micro_batches
    ops, of_part = _ops(device, dtype, compiling), _of_micro_batches(limits, num_parts)
    max_graph_seqs = min(compiling.max_graph_seqs, of_part.max_seqs) if compiling.graphs else 0
    with stages.stage("tensor ranks") if place.size > 1 else nullcontext():
        shape = RankShape(spec, dtype, device, ops, of_part.max_tokens)
        spreads = build_spreads(
            async_tp, meeting.tensor, shape, max_graph_seqs, world=meeting.world, tune=partial(_tune_layers, ops)
        )
    if spreads.shards is not None:
        max_graph_seqs = min(max_graph_seqs, spreads.min_tokens - 1)  # what is in shards is not captured
    with stages.stage("weights"):
        decoder = build_decoder(spec, dtype, device, meeting.tensor, ops, spreads, part)
        _set_weights(decoder, model, model_dir, progress)
    if kind == "cpu":
        torch.set_num_threads(resolve_num_threads(attention, decoder, place.num_sharing))
    else:
        # Only the last stage has logits.
        counted = rank_spec if part.is_last else msgspec.structs.replace(rank_spec, vocab_size=0)
        limits = least_limits(
            meeting.world, _fitting_limits(limits, counted, dtype, cache, schedule, device, num_parts)
        )
    parts = Parts(
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
        num_sharing=place.num_sharing,
        setup=_setup(meeting.pairs, spec, limits, dtype, device) if meeting.pairs is not None else None,
    )
    with stages.stage("matrices"):
        _tune(decoder, ops, _alone(_of_micro_batches(limits, num_parts), spreads), max_graph_seqs, stages)
    with stages.stage("memory"):
        num_pages = parts.num_pages()
    with stages.stage("attention"):
        runner = parts.runner(num_pages)
    grouped = runner.ready.group_min_seqs if schedule.group_min_seqs == "auto" else schedule.group_min_seqs
    warm_up(runner, stages, max_graph_seqs, grouped > 0, num_parts)
    stages.report()
    return runner


def _set_weights(decoder: Decoder, model: ModelConfig, model_dir: Path, progress: bool) -> None:
    if model.load == "random":
        random_weights(decoder, seed=0)
    else:
        load_weights(decoder, model_dir, progress)


def _of_micro_batches(limits: Limits, num_parts: int) -> Limits:
    """The limits of each of a step's parts."""
    num_tokens = most_tokens(limits.max_seqs, limits.max_tokens, num_parts)
    return replace(limits, max_seqs=most_rows(limits.max_seqs, num_parts), max_tokens=num_tokens)


def _setup(pairs: Pairs, spec: ModelSpec, limits: Limits, dtype: torch.dtype, device: torch.device) -> StageSetup:
    """Of this rank's stage; its links need memory, which what measures memory must see."""
    num_parts = pairs.place.num_micro_batches
    num_tokens = most_tokens(limits.max_seqs, limits.max_tokens, num_parts)
    links = links_of(pairs, spec.hidden_size, dtype, num_tokens, limits.max_seqs)
    return StageSetup(links, num_parts, spec.hidden_size, dtype, device)


def _fitting_limits(
    limits: Limits,
    spec: ModelSpec,
    dtype: torch.dtype,
    cache: CacheConfig,
    schedule: ScheduleConfig,
    device: torch.device,
    num_parts: int,
) -> Limits:
    """The limits whose largest step fits this GPU, as far as they are automatic. Raises ModelError."""
    # What is automatic leaves half of the memory to the cache.
    share = 0.5 if "auto" in (schedule.max_seqs, schedule.max_tokens) else 1.0

    def check(tried: Limits) -> None:
        check_largest_step(spec, tried, dtype, cache.page_size, device, cache.memory_fraction, share, num_parts)

    return fitting_limits(limits, schedule, check)


def _ops(device: torch.device, dtype: torch.dtype, compiling: CompileConfig) -> Ops:
    """Fused kernels on a GPU, unless a compiler fuses."""
    if device.type == "cpu" or compiling.enabled or not has_kernels(device):
        return TorchOps()
    from toka_async.runner.products import make_ops

    return make_ops(device, dtype, compiling.tune)


def _tune(decoder: Decoder, ops: Ops, limits: Limits, max_graph_seqs: int, stages: Stages) -> None:
    if isinstance(ops, TorchOps):
        return
    from toka_async.kernels.fused import FusedOps
    from toka_async.runner.products import tune_products

    if isinstance(ops, FusedOps):
        tune_products(decoder, ops, limits, max_graph_seqs, stages.show)


def _tune_layers(ops: Ops, decoder: Decoder, counts: Sequence[int]) -> None:
    if isinstance(ops, TorchOps):
        return
    from toka_async.kernels.fused import FusedOps
    from toka_async.runner.products import tune_layers

    if isinstance(ops, FusedOps):
        tune_layers(decoder, ops, counts)


def _alone(limits: Limits, spreads: Spreads) -> Limits:
    """The limits of products that are not part of an overlapping operation; those of sampled tokens never are."""
    if not isinstance(spreads.shards, OverlappedShards):
        return limits
    return replace(limits, max_tokens=min(limits.max_tokens, max(limits.max_seqs, spreads.min_tokens - 1)))


def has_kernels(device: torch.device) -> bool:
    """Whether our kernels run there."""
    return device.type == "cuda" and find_spec("triton") is not None


@dataclass(slots=True, frozen=True)
class Parts:
    """What a runner is made of, but for the size of its cache. spec: of the rank. setup: of a pipeline's stage."""

    decoder: Decoder
    spec: ModelSpec
    meeting: Meeting
    limits: Limits
    cache: CacheConfig
    schedule: ScheduleConfig
    attention: AttentionConfig
    compiling: CompileConfig
    dtype: torch.dtype
    device: torch.device
    num_sharing: int = 1
    setup: StageSetup | None = None

    def num_pages(self) -> int:
        """Of the cache: as many as every rank can have."""
        return self.meeting.world.minimum(self._own_num_pages())

    def _own_num_pages(self) -> int:
        """As configured or as memory allows once the largest step has what it needs."""
        page_bytes = page_bytes_of(self.spec, self.cache, self.dtype)
        if self.device.type == "cuda":
            most = self._memory_for_cache(page_bytes)
            return resolve_num_pages(self.cache, self.limits, page_bytes, most, most)
        available = available_memory()
        # What is configured is not divided: who starts again finds that the others have taken theirs.
        auto, most = int(_AUTO_CPU_SHARE * available / self.num_sharing), int(_MOST_CPU_SHARE * available)
        return resolve_num_pages(self.cache, self.limits, page_bytes, auto, most)

    def _memory_for_cache(self, page_bytes: int) -> int:
        """Bytes: what the largest step leaves, which is computed once to find out."""
        fraction = self.cache.memory_fraction
        page_size = self.cache.page_size
        torch.cuda.reset_peak_memory_stats(self.device)
        num_pages = pages_for_trial(self.limits, page_size, page_bytes, self.device, fraction)
        try:
            runner = self.runner(num_pages, trial=True)
            largest_load(runner.ready)(runner)
            torch.cuda.synchronize(self.device)
        except torch.OutOfMemoryError:
            raise does_not_fit(self.limits) from None
        peak = torch.cuda.max_memory_allocated(self.device) - (num_pages + 1) * page_bytes
        del runner
        gc.collect()
        torch.cuda.empty_cache()
        return memory_for_cache(self.device, fraction, peak)

    def runner(self, num_pages: int, trial: bool = False) -> Runner:
        """A runner over a new cache; `trial`: nothing is measured or compiled for it."""
        spec, limits = self.spec, self.limits
        # One page more, for rows that only fill up a batch.
        kv_cache = KVCache(
            spec.num_layers, num_pages + 1, spec.num_kv_heads, self.cache.page_size, spec.head_dim, self.dtype,
            self.device,
        )  # fmt: skip
        built = build_attention(
            self.attention.backend,
            kv_cache,
            spec.num_heads,
            spec.windows,
            max_seqs=limits.max_seqs,
            max_tokens=limits.max_tokens,
            table=NOT_MEASURED if trial else None,
            agree=partial(table_of_first, self.meeting.tensor),
        )
        group_min_seqs, group_min_tokens = group_of_first(self.meeting.world, built.smallest_group)
        room = num_pages * self.cache.page_size
        ready = Ready(
            num_pages=num_pages,
            page_size=self.cache.page_size,
            max_seqs=limits.max_seqs,
            max_context=limits.max_context if trial else min(limits.max_context, room),
            vocab_size=spec.vocab_size,
            max_tokens=limits.max_tokens,
            group_min_seqs=group_min_seqs,
            group_min_tokens=group_min_tokens,
            async_tp_min_tokens=self.decoder.spreads.min_tokens,
        )
        compiled, num_compiles = None, None
        if self.compiling.enabled and not trial:
            from toka_async.model.compiled import compile_forward

            compiled = compile_forward(self.decoder, built.backend)
        if has_kernels(self.device):
            from toka_async.runner.compiles import CompileCounter

            num_compiles = CompileCounter(partial(getattr, compiled, "num_eager") if compiled else int).count
        return Runner(
            self.decoder,
            kv_cache,
            built.backend,
            ready,
            self.device,
            forward=compiled,
            num_compiles=num_compiles,
            freeze=compiled.freeze if compiled else None,
            use_kernels=has_kernels(self.device),
            graphs=built.graphs,
            pays=self._pays(built),
            agree=self.meeting.tensor.of_first,
            shares=self._shares(),
            setup=self.setup,
        )

    def _shares(self) -> RowShares | None:
        """Of the stage that samples, if it is of several ranks."""
        tensor = self.meeting.tensor
        if tensor.size == 1 or self.decoder.head is None:
            return None
        return RowShares(tensor, self.decoder.own_logits, self.limits.max_seqs)

    def _pays(self, built: Attention) -> Callable[[int, int], bool] | None:
        """What was measured, unless the configuration says; a micro-batch's part of a group may be too small for it."""
        least = self.schedule.group_min_seqs
        if least == self.schedule.group_min_tokens == "auto":
            return built.pays
        return None if least == "auto" else lambda num_rows, num_tokens: num_rows >= least  # noqa: ARG005


def least_limits(comm: Comm, limits: Limits) -> Limits:
    """What the rank with the least memory can do."""
    return replace(limits, max_seqs=comm.minimum(limits.max_seqs), max_tokens=comm.minimum(limits.max_tokens))


def group_of_first(comm: Comm, smallest: tuple[int, int]) -> tuple[int, int]:
    """The fewest rows and tokens of a group, as the first rank has it."""
    return msgspec.json.decode(comm.of_first(msgspec.json.encode(smallest)), type=tuple[int, int])


def table_of_first(comm: Comm, table: Table) -> Table:
    """All ranks choose alike, or else they would compute a step in different ways."""
    return msgspec.json.decode(comm.of_first(msgspec.json.encode(table)), type=Table)


def resolve_device(model: ModelConfig, place: Place = ALONE) -> torch.device:
    """`auto` is the rank's GPU where there is one; it becomes the current one."""
    if model.device == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        num_devices = torch.cuda.device_count()
        if place.device_index >= num_devices:
            raise ModelError(
                f"parallel.dp={place.num_sharing // place.world_size}, parallel.pp={place.num_stages}, "
                f"parallel.tp={place.size}: each of {place.num_sharing} ranks needs a GPU where this machine shows "
                f"{num_devices}; use fewer, or model.device=cpu"
            )
        torch.cuda.set_device(place.device_index)
        return torch.device("cuda", place.device_index)
    if model.device == "cuda":
        raise ModelError("model.device=cuda: this machine has no CUDA device that torch can use; use cpu or auto")
    return torch.device("cpu")


def resolve_dtype(model: ModelConfig, spec: ModelSpec, device: torch.device) -> torch.dtype:
    """`auto` is float32 on a CPU, else the checkpoint's."""
    name = model.dtype
    if name == "auto":
        return torch.float32 if device.type == "cpu" else getattr(torch, spec.dtype)
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def resolve_num_threads(attention: AttentionConfig, decoder: nn.Module, num_sharing: int = 1) -> int:
    """`auto` is one thread for small models and all cores for others, divided among those who share them.

    Measured on two cores, one thread and two: 2M parameters decode 64 rows in 11 ms and 20, and one row in 2.6 and 3.1;
    20M parameters decode one row in 19 ms and 10.
    """
    if attention.num_threads != "auto":
        return attention.num_threads
    small = sum(parameter.numel() for parameter in decoder.parameters()) < _SMALL_PARAMETERS
    return 1 if small else max(1, len(os.sched_getaffinity(0)) // num_sharing)
