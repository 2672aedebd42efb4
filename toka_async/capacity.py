"""`toka-async plan`: what each GPU would hold, computed from the configuration and the model's shape alone.

Starts nothing and loads no weights. Counts the weights, the largest step as the start estimates it before it measures,
and the cache in the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import torch

from toka_async.attention.kv_cache import bytes_per_token
from toka_async.bar import format_count
from toka_async.checkpoint.cost import count_stage_bytes
from toka_async.checkpoint.division import check_division, group_experts, make_rank_spec, make_stage_spec, stage_parts
from toka_async.checkpoint.hub import resolve_model
from toka_async.checkpoint.implementation import read_model
from toka_async.checkpoint.limits import RankLimits, resolve_limits, resolve_num_window_pages
from toka_async.checkpoint.spec import ModelError, ModelSpec
from toka_async.config import Config, ParallelConfig
from toka_async.runner.micro_batches import count_most_rows, count_most_tokens
from toka_async.startup.cache_size import (
    check_states,
    choose_shares,
    compute_spare_bytes,
    count_graph_bytes,
    count_graph_rows,
    count_graph_tokens,
    count_page_bytes,
    count_row_bytes,
    count_states_bytes,
    count_token_bytes,
    fit_limits,
)
from toka_async.startup.device import name_types, resolve_stored_dtype
from toka_async.startup.weights_fit import advise
from toka_async.topology import Layout, make_layout
from toka_async.tuning.async_tp import count_workspace_bytes

GIB = 1 << 30
LENGTHS = (512, 2048, 8192)  # tokens of the counted sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """The share of one GPU, counted on its machine. layers: the first, and the one behind the last.

    num_tokens: in its cache. states: of recurrent layers. Others: bytes.
    """

    node: int
    gpu: int
    replica: int
    stage: int
    tp_rank: int
    layers: tuple[int, int]
    weights: int
    states: int
    largest_step: int
    kv_token: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """All ranks, and the limits that they were made for."""

    config: Config
    spec: ModelSpec
    dtype: torch.dtype
    memory: int
    limits: RankLimits
    ranks: list[RankPlan]

    @property
    def num_tokens(self) -> int:
        """Tokens in one replica's cache: those of its fullest GPU."""
        return min(rank.num_tokens for rank in self.ranks)

    @property
    def num_window_tokens(self) -> int:
        """Of these, the tokens that layers with a window keep; 0 without such layers."""
        cache = self.config.cache
        num_pages = self.num_tokens // cache.page_size
        return resolve_num_window_pages(cache, self.limits, self.spec.window, num_pages) * cache.page_size


def device_memory() -> int | None:
    """Bytes of the first GPU; None without one."""
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


@dataclass(frozen=True, slots=True)
class Stage:
    """The share of each rank of a stage.

    part: its shape. first_layer: its number in the model. weights: bytes. stored: what keys and values are stored as.
    """

    part: ModelSpec
    first_layer: int
    weights: int
    is_last: bool
    dtype: torch.dtype
    stored: torch.dtype

    def count_largest_step(self, limits: RankLimits, config: Config) -> int:
        """Bytes of the largest step, with those that tensor ranks share; only the last stage has logits."""
        row, token = self.count_each(limits, config)
        return limits.max_tokens * token + limits.max_seqs * row + self._shared(limits, config.parallel)

    def count_each(self, limits: RankLimits, config: Config) -> tuple[int, int]:
        """Bytes of a row and of a token."""
        page_size, num_parts = config.cache.page_size, config.parallel.num_micro_batches
        row = count_row_bytes(self._counted, limits, self.dtype, page_size, num_parts)
        return row, count_token_bytes(self.part, self.dtype, num_parts, self.stored)

    def count_states(self, limits: RankLimits, config: Config) -> int:
        """Bytes of all states of recurrent layers."""
        return count_states_bytes(self.part, limits, config.cache, self.dtype)

    def count_graphs(self, limits: RankLimits, config: Config, memory: int) -> int:
        """Bytes in which captured steps compute. A start captures none without our own attention kernels."""
        if config.attention.backend in ("reference", "flashinfer"):
            return 0
        num_parts = config.parallel.num_micro_batches
        most = count_most_rows(limits.max_seqs, num_parts)
        num_rows = count_graph_rows(config.graphs, self._counted, self.dtype, memory, most)
        max_tokens = count_most_tokens(limits.max_seqs, limits.max_tokens, num_parts)
        num_tokens = count_graph_tokens(config.graphs, self.part, self.dtype, memory, max_tokens)
        if config.model.batch_invariant:  # only decoding steps are captured
            num_tokens = 0
        return count_graph_bytes(self._counted, self.dtype, num_rows, num_tokens)

    @property
    def _counted(self) -> ModelSpec:
        """The shape without a vocabulary where there are no logits."""
        return self.part if self.is_last else msgspec.structs.replace(self.part, vocab_size=0)

    def _shared(self, limits: RankLimits, parallel: ParallelConfig) -> int:
        """Bytes that tensor ranks share; a start gives them back if overlapping does not pay."""
        if parallel.tp == 1 or parallel.async_tp_min_tokens == 0:
            return 0
        num_tokens = count_most_tokens(limits.max_seqs, limits.max_tokens, parallel.num_micro_batches)
        return count_workspace_bytes(self.part, self.dtype, num_tokens, parallel.tp)


def make_plan(config: Config, memory: int) -> CapacityPlan:
    """Plan for GPUs of `memory` bytes. Raises ModelError: no such model, not divisible, or too large a step."""
    spec = read_model(resolve_model(config.model.path, weights=False), config.model, config.parallel)
    spec = msgspec.structs.replace(spec, fp32_logits=config.model.fp32_logits)
    spec = group_experts(spec, config.parallel.ep)
    check_division(spec, config.parallel.pp, config.parallel.tp)
    dtype: torch.dtype = getattr(torch, spec.dtype if config.model.dtype == "auto" else config.model.dtype)
    asked = resolve_limits(config.model, config.schedule, spec, "cuda")
    spec = spec.fit_context(asked.max_context).store_states(config.cache.state_dtype)
    stages = make_stages(spec, config.parallel, dtype, resolve_stored_dtype(config.cache, dtype))
    usable = int(config.cache.memory_fraction * memory) - compute_spare_bytes(memory)
    for index, stage in enumerate(stages):
        if stage.weights >= usable:
            raise ModelError(
                f"stage {index} has {_format_gib(stage.weights)} of weights a GPU where {_format_gib(max(usable, 0))} "
                f"of {_format_gib(memory)} can be used; {advise(spec, config.parallel.tp, dtype, usable)}"
            )
    rows, tokens = zip(*(stage.count_each(asked, config) for stage in stages), strict=True)
    row = max(rows) + max(stage.part.count_state_bytes(dtype.itemsize) for stage in stages)
    limits = fit_limits(asked, config.schedule, partial(_check_step, config, stages, usable), row, max(tokens))
    layout = make_layout(config)
    ranks = [
        _make_rank_plan(config, limits, memory, usable, layout, replica, rank, stages)
        for replica in range(layout.dp)
        for rank in range(layout.num_ranks)
    ]
    return CapacityPlan(config, spec, dtype, memory, limits, ranks)


def _check_step(config: Config, stages: Sequence[Stage], usable: int, limits: RankLimits) -> None:
    """Raises ModelError when a stage's largest step does not fit; `auto` limits may take half, as at the start."""
    shares = choose_shares(config.schedule)
    for stage in stages:
        left = usable - stage.weights
        check_states(stage.part, limits, config.cache, stage.dtype, int(shares.states * left))
        step, left = stage.count_largest_step(limits, config), left - stage.count_states(limits, config)
        if step > shares.step * left:
            raise ModelError(
                f"schedule.max_seqs={limits.max_seqs}, schedule.max_tokens={limits.max_tokens}: the largest step "
                f"takes about {_format_gib(step)} where {_format_gib(left)} are left; use less"
            )


def _make_rank_plan(
    config: Config,
    limits: RankLimits,
    memory: int,
    usable: int,
    layout: Layout,
    replica: int,
    rank: int,
    stages: Sequence[Stage],
) -> RankPlan:
    index, tp_rank = layout.find_stage(rank)
    stage, page_size = stages[index], config.cache.page_size
    step = stage.count_largest_step(limits, config)
    states = stage.count_states(limits, config)
    left = usable - stage.weights - states - step - stage.count_graphs(limits, config, memory)
    window = max(each.part.window for each in stages)
    page_bytes = count_page_bytes(stage.part, config.cache, stage.dtype, window)
    num_pages = page_bytes.count_fitting(config.cache, limits, left)
    return RankPlan(
        node=layout.find_node(rank),
        gpu=layout.choose_gpu(replica, rank),
        replica=replica,
        stage=index,
        tp_rank=tp_rank,
        layers=(stage.first_layer, stage.first_layer + stage.part.num_layers),
        weights=stage.weights,
        states=states,
        largest_step=step,
        kv_token=bytes_per_token(stage.part, stage.stored),
        num_tokens=num_pages * page_size,
    )


def make_stages(spec: ModelSpec, parallel: ParallelConfig, dtype: torch.dtype, stored: torch.dtype) -> list[Stage]:
    rank_spec = msgspec.structs.replace(
        make_rank_spec(spec, parallel.tp), vocab_size=-(-spec.vocab_size // parallel.tp)
    )
    stages = []
    for part in stage_parts(spec, parallel.pp, parallel.tp):
        of_stage = make_stage_spec(rank_spec, part)
        weights = count_stage_bytes(of_stage, part.is_first, part.is_last, dtype.itemsize)
        stages.append(Stage(of_stage, part.first, weights, part.is_last, dtype, stored))
    return stages


def plan_lines(plan: CapacityPlan) -> Iterator[str]:
    """The plan for people: a line for each GPU, and totals."""
    config, parallel = plan.config, plan.config.parallel
    sizes = f"parallel.dp={parallel.dp}, pp={parallel.pp}, tp={parallel.tp}" + f", ep={parallel.ep}" * (parallel.ep > 1)
    yield (
        f"{config.model.path}: {plan.spec.num_layers} layers, {name_types(plan.spec, plan.dtype, config.cache)}; "
        f"{sizes}: {format_count(len(plan.ranks), 'GPU')} of "
        f"{_format_gib(plan.memory)}, {config.cache.memory_fraction:.0%} of each"
    )
    yield f"schedule.max_seqs={plan.limits.max_seqs}, schedule.max_tokens={plan.limits.max_tokens}: at most"
    yield from _align(
        [
            (
                "GPU",
                "replica",
                "stage",
                "tp rank",
                "layers",
                "weights",
                "states",
                "largest step",
                "KV a token",
                "tokens that fit",
            )
        ]
        + [
            (
                f"{rank.gpu} of node {rank.node}" if config.cluster.nodes > 1 else str(rank.gpu),
                *map(str, (rank.replica, rank.stage, rank.tp_rank)),
                f"{rank.layers[0]}-{rank.layers[1] - 1}",
                _format_gib(rank.weights),
                _format_gib(rank.states),
                _format_gib(rank.largest_step),
                f"{rank.kv_token / 1024:.1f} KiB",
                f"{rank.num_tokens:,}",
            )
            for rank in plan.ranks
        ]
    )
    wanted = config.cache.num_tokens
    if wanted != "auto":
        yield f"cache.num_tokens={wanted}: {'fits' if wanted <= plan.num_tokens else 'does not fit'}"
    yield f"{plan.num_tokens:,} tokens a replica, {plan.num_tokens * parallel.dp:,} in all"
    if plan.spec.window:
        yield f"{plan.num_window_tokens:,} of them in layers that see {plan.spec.window:,} tokens"
    yield "sequences that the cache of a replica holds at once: " + ", ".join(_count_held(plan))


def _count_held(plan: CapacityPlan) -> Iterator[str]:
    """Count the sequences of some lengths that run at once. Samples share their prompt, so more of them fit."""
    context, window, size = plan.limits.max_context, plan.spec.window, plan.config.cache.page_size
    for length in [*(each for each in LENGTHS if each < context), context]:
        name = " (model.max_context)" if length == context else ""
        count = min(plan.limits.max_seqs, plan.num_tokens // length)
        if window:
            count = min(count, plan.num_window_tokens // min(length, window + 2 * size))
        yield f"{count:,} of {length:,} tokens{name}"


def _align(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))


def _format_gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
