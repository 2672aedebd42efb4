"""Makes a rank's runner from a model directory and the configuration: device, weights, cache, attention, warm-up.

Knows how the parts fit together; knows no processes and no sockets.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from toka_async.attention.build import AttentionParts, BuiltAttention, build_attention
from toka_async.attention.choice import ChoiceTable, every_group_pays
from toka_async.attention.invariant import build_invariant_attention
from toka_async.attention.kv_cache import KVCache, bytes_per_token
from toka_async.checkpoint.division import make_rank_spec, make_stage_spec, stage_parts
from toka_async.checkpoint.limits import DeviceKind, RankLimits, resolve_limits, resolve_num_pages
from toka_async.checkpoint.spec import ModelSpec
from toka_async.config import Config
from toka_async.messages import Ready
from toka_async.model.activation_layout import LayoutPolicy
from toka_async.model.blocked_ops import BlockedOps
from toka_async.model.decoder import Decoder
from toka_async.model.ops import Ops, TorchOps
from toka_async.model.ordered_sums import OrderedSums
from toka_async.model.overlap import OverlappedShards
from toka_async.model.sampling import sample, sample_alone
from toka_async.model.weights import build_decoder, load_weights, random_weights
from toka_async.runner.compiles import CompileCounter
from toka_async.runner.micro_batches import count_most_rows, count_most_tokens
from toka_async.runner.mixed import list_mixed_sizes
from toka_async.runner.pipeline import StageSetup
from toka_async.runner.runner import Runner, SamplingSetup
from toka_async.runner.samples import RowShares
from toka_async.startup.cache_size import (
    check_largest_step,
    choose_graph_tokens,
    compute_cache_memory,
    count_graph_token_bytes,
    count_page_bytes,
    count_trial_pages,
    fit_limits,
    make_misfit_error,
)
from toka_async.startup.described import count_weight_bytes, describe_device
from toka_async.startup.device import has_kernels, resolve_device, resolve_dtype, resolve_num_threads
from toka_async.startup.memory import choose_cpu_cache_bytes
from toka_async.startup.process_groups import build_links, make_groups
from toka_async.startup.progress import StartupProgress
from toka_async.startup.rank_coords import ALONE, RankCoords
from toka_async.startup.warmup import make_largest_load, warm_up
from toka_async.startup.weights_fit import catch_lost_memory, check_weights_fit, measure_free_bytes
from toka_async.tuning.async_tp import RankShape, build_layouts
from toka_async.tuning.attention import AttentionChoice
from toka_async.tuning.settle import settle
from toka_async.tuning.store import Facts, TuningCache, describe_gpu, find_folder

if TYPE_CHECKING:  # needs Triton, which is not everywhere
    from toka_async.tuning.gemm import ProductTuning


class RunnerFactory:
    """Makes one runner. Ranks of one model must be built at the same time: they wait for each other."""

    def __init__(
        self, model_dir: Path, spec: ModelSpec, config: Config, coords: RankCoords = ALONE, progress: bool = True
    ) -> None:
        """Connects to the other ranks. Raises ModelError that names the field and the fix."""
        self.model_dir = model_dir
        self.spec = spec
        self.config = config
        self.coords = coords
        self.device = resolve_device(config.model, coords)
        self.kind: DeviceKind = "cuda" if self.device.type == "cuda" else "cpu"
        self.invariant = config.model.batch_invariant
        self.groups = make_groups(coords, self.device)
        if self.invariant and coords.size > 1:
            self.groups = replace(self.groups, tensor=OrderedSums(self.groups.tensor))
        progress = progress and coords.world_rank == 0
        self.stages = StartupProgress(sys.stderr, progress, logged=progress and self.kind == "cuda")
        self.dtype = resolve_dtype(config.model, spec, self.device)
        self.limits = resolve_limits(config.model, config.schedule, spec, self.kind)
        self.part = stage_parts(spec, coords.num_stages, coords.size)[coords.stage]
        self.rank_spec = make_stage_spec(make_rank_spec(spec, coords.size), self.part)
        free = measure_free_bytes(self.device, config.cache.memory_fraction)
        check_weights_fit(spec, self.part, coords.size, self.dtype, free, self.kind)
        self.tuning_cache = open_tuning_cache(self.device, config)
        self.ops = self._make_ops()
        self.tuning = self._make_tuning()

    def build(self) -> Runner:
        """Builds the runner, ready for its first step. Raises ModelError."""
        with self.stages.stage("tensor ranks") if self.coords.size > 1 else nullcontext():
            layouts = self._build_layouts()
        with self.stages.stage("weights"), catch_lost_memory(self.spec, self.part, self.coords.size, self.dtype):
            decoder = self._load_decoder(layouts)
        if self.kind == "cuda":
            self.limits = self._fit_limits()
        else:
            self._set_num_threads(decoder)
        stage = self._connect_stage()
        max_graph_rows, max_graph_tokens = self._count_graph_rows(layouts), self._count_graph_tokens(layouts)
        with self.stages.stage("matrices"):
            if self.tuning is not None:
                limits = limit_separate(limit_part(self.limits, self.coords.num_micro_batches), layouts)
                self.tuning.tune(decoder, limits, max_graph_rows, self.stages.show)
        with self.stages.stage("memory"):
            num_pages = self.groups.world.minimum(self._count_pages(decoder, stage, max_graph_tokens))
        with self.stages.stage("attention"):
            runner = self._make_runner(decoder, stage, num_pages, self._choose_table)
        self._warm_up(runner, decoder, max_graph_rows, max_graph_tokens)
        self.stages.report()
        self.tuning_cache.report()
        cache_bytes = (num_pages + 1) * self.config.cache.page_size * bytes_per_token(self.rank_spec, self.dtype)
        described = describe_device(
            self.coords.world_rank, self.device, self.dtype, count_weight_bytes(decoder), cache_bytes
        )
        runner.ready = msgspec.structs.replace(runner.ready, ranks=(described,))
        return runner

    def _make_ops(self) -> Ops:
        """Makes the operations of layers: kernels on a GPU, otherwise plain torch."""
        if not has_kernels(self.device):
            return BlockedOps() if self.invariant else TorchOps()
        if self.invariant:
            from toka_async.kernels.invariant.products import InvariantOps

            return InvariantOps()
        from toka_async.tuning.gemm import make_ops

        return make_ops(self.device, self.dtype, self.config.tuning.products)

    def _make_tuning(self) -> ProductTuning | None:
        """Returns None where there is nothing to tune: without kernels, and where one tile computes every product."""
        if not has_kernels(self.device) or self.invariant:
            return None
        from toka_async.kernels.fused import FusedOps
        from toka_async.tuning.gemm import ProductTuning

        assert isinstance(self.ops, FusedOps)
        return ProductTuning(self.ops, self.tuning_cache)

    def _build_layouts(self) -> LayoutPolicy:
        """Decides how steps are spread over the tensor ranks."""
        limits = limit_part(self.limits, self.coords.num_micro_batches)
        return build_layouts(
            # A row of a step in shards is summed otherwise than one of a small step.
            0 if self.invariant else self.config.parallel.async_tp_min_tokens,
            self.groups.tensor,
            RankShape(self.spec, self.dtype, self.device, self.ops, limits.max_tokens),
            self._count_graph_rows(),
            self.tuning_cache,
            self.groups.world,
            None if self.tuning is None else self.tuning.tune_layers,
        )

    def _count_graph_rows(self, layouts: LayoutPolicy | None = None) -> int:
        """Counts the rows of the largest graph; 0: none is captured. Steps in shards are not captured."""
        graphs = self.config.graphs
        if not graphs.enabled:
            return 0
        most = min(graphs.max_rows, limit_part(self.limits, self.coords.num_micro_batches).max_seqs)
        return most if layouts is None or layouts.shards is None else min(most, layouts.min_tokens - 1)

    def _count_graph_tokens(self, layouts: LayoutPolicy) -> int:
        """Counts the tokens of the largest graph of steps with prompts, alike on all ranks; 0: none is captured."""
        graphs = self.config.graphs
        if not graphs.enabled or not has_kernels(self.device):
            return 0
        most = limit_part(self.limits, self.coords.num_micro_batches).max_tokens
        if graphs.max_tokens == "auto":
            total = torch.cuda.get_device_properties(self.device).total_memory
            most = min(most, self.groups.world.minimum(choose_graph_tokens(self.rank_spec, self.dtype, total)))
        else:
            most = min(most, graphs.max_tokens)
        return most if layouts.shards is None else min(most, layouts.min_tokens - 1)

    def _load_decoder(self, layouts: LayoutPolicy) -> Decoder:
        decoder = build_decoder(self.spec, self.dtype, self.device, self.groups.tensor, self.ops, layouts, self.part)
        if self.config.model.load == "random":
            random_weights(decoder, seed=0)
        else:
            load_weights(decoder, self.model_dir, self.stages.show)
        return decoder

    def _set_num_threads(self, decoder: Decoder) -> None:
        num_parameters = sum(parameter.numel() for parameter in decoder.parameters())
        num_threads = resolve_num_threads(self.config.attention, num_parameters, self.coords.num_sharing)
        torch.set_num_threads(num_threads)

    def _fit_limits(self) -> RankLimits:
        """Halves limits that are `auto` until the largest step fits every rank's GPU. Raises ModelError."""
        cache, schedule, world = self.config.cache, self.config.schedule, self.groups.world
        # Only the last stage has logits.
        counted = self.rank_spec if self.part.is_last else msgspec.structs.replace(self.rank_spec, vocab_size=0)
        # What is automatic leaves half of the memory to the cache.
        share = 0.5 if "auto" in (schedule.max_seqs, schedule.max_tokens) else 1.0

        def check(tried: RankLimits) -> None:
            check_largest_step(
                counted,
                tried,
                self.dtype,
                cache.page_size,
                self.device,
                cache.memory_fraction,
                share,
                self.coords.num_micro_batches,
            )

        fitting = fit_limits(self.limits, schedule, check)
        return replace(fitting, max_seqs=world.minimum(fitting.max_seqs), max_tokens=world.minimum(fitting.max_tokens))

    def _connect_stage(self) -> StageSetup | None:
        """Connects this rank's stage, before memory is measured, as links take some; None without a pipeline."""
        if self.groups.pairs is None:
            return None
        hidden_size, num_parts = self.spec.hidden_size, self.coords.num_micro_batches
        num_tokens = limit_part(self.limits, num_parts).max_tokens
        links = build_links(self.groups.pairs, hidden_size, self.dtype, num_tokens, self.limits.max_seqs)
        return StageSetup(links, num_parts, hidden_size, self.dtype, self.device)

    def _count_pages(self, decoder: Decoder, stage: StageSetup | None, max_graph_tokens: int) -> int:
        """Counts the pages of this rank's cache: as configured, or as memory allows beside graphs and steps."""
        page_bytes = count_page_bytes(self.rank_spec, self.config.cache, self.dtype)
        if self.kind == "cuda":
            graph_bytes = max_graph_tokens * count_graph_token_bytes(self.rank_spec, self.dtype)
            auto = most = self._measure_memory(decoder, stage, page_bytes) - graph_bytes
        else:
            auto, most = choose_cpu_cache_bytes(self.coords.num_sharing)
        return resolve_num_pages(self.config.cache, self.limits, page_bytes, auto, most)

    def _measure_memory(self, decoder: Decoder, stage: StageSetup | None, page_bytes: int) -> int:
        """Measures the bytes that the largest step leaves to the cache, by computing it once."""
        cache = self.config.cache
        torch.cuda.reset_peak_memory_stats(self.device)
        num_pages = count_trial_pages(self.limits, cache.page_size, page_bytes, self.device, cache.memory_fraction)
        try:
            runner = self._make_runner(decoder, stage, num_pages)
            make_largest_load(runner.ready)(runner)
            torch.cuda.synchronize(self.device)
        except torch.OutOfMemoryError:
            raise make_misfit_error(self.limits) from None
        peak = torch.cuda.max_memory_allocated(self.device) - (num_pages + 1) * page_bytes
        del runner
        gc.collect()
        torch.cuda.empty_cache()
        return compute_cache_memory(self.device, cache.memory_fraction, peak)

    def _make_runner(
        self,
        decoder: Decoder,
        stage: StageSetup | None,
        num_pages: int,
        choose: Callable[[AttentionParts], ChoiceTable] | None = None,
    ) -> Runner:
        """Makes a runner over a new cache. choose: see `build_attention`; None: the runner is for a trial."""
        spec, limits, page_size = self.rank_spec, self.limits, self.config.cache.page_size
        # One page more, for rows that only fill up a batch.
        cache = KVCache(
            spec.num_layers, num_pages + 1, spec.num_kv_heads, page_size, spec.head_dim, self.dtype, self.device
        )
        backend = self.config.attention.backend
        if self.invariant:
            attention = build_invariant_attention(backend, cache, spec.num_heads, spec.windows, limits.max_seqs)
        else:
            attention = build_attention(
                backend,
                cache,
                spec.num_heads,
                spec.windows,
                max_seqs=limits.max_seqs,
                max_tokens=limits.max_tokens,
                choose=choose,
            )
        group_min_seqs, group_min_tokens = self.groups.world.agree(attention.smallest_group, tuple[int, int])
        ready = Ready(
            num_pages=num_pages,
            page_size=page_size,
            max_seqs=limits.max_seqs,
            max_context=limits.max_context if choose is None else min(limits.max_context, num_pages * page_size),
            vocab_size=spec.vocab_size,
            max_tokens=limits.max_tokens,
            group_min_seqs=group_min_seqs,
            group_min_tokens=group_min_tokens,
            async_tp_min_tokens=decoder.layouts.min_tokens,
        )
        compiles = CompileCounter()
        if has_kernels(self.device):
            compiles.watch()
        return Runner(
            ready,
            self.device,
            decoder,
            cache,
            replace(attention, pays=self._make_group_rule(attention)),
            SamplingSetup(
                has_kernels(self.device),
                self._share_rows(decoder),
                sample_alone if self.invariant and self.kind == "cuda" else sample,
            ),
            stage,
            compiles,
        )

    def _choose_table(self, parts: AttentionParts) -> ChoiceTable:
        """Chooses the same table on all ranks of a stage, or they would compute a step in different ways."""
        return settle(AttentionChoice(parts), self.tuning_cache, self.groups.tensor)

    def _make_group_rule(self, attention: BuiltAttention) -> Callable[[int, int], bool]:
        """Decides which groups pay, as configured or measured. A micro-batch may have too small a part of one."""
        schedule, least = self.config.schedule, self.config.schedule.group_min_seqs
        if least == schedule.group_min_tokens == "auto":
            return attention.pays
        return every_group_pays if least == "auto" else lambda num_rows, num_tokens: num_rows >= least  # noqa: ARG005

    def _share_rows(self, decoder: Decoder) -> RowShares | None:
        """Divides the rows to sample among ranks; None: this rank is alone, or its stage does not sample."""
        tensor = self.groups.tensor
        if tensor.size == 1 or decoder.head is None:
            return None
        return RowShares(tensor, decoder.own_logits, self.limits.max_seqs)

    def _warm_up(self, runner: Runner, decoder: Decoder, max_graph_rows: int, max_graph_tokens: int) -> None:
        """Computes every kind of step, and captures graphs."""
        schedule, most = self.config.schedule, min(max_graph_rows, self.limits.max_seqs)
        least = runner.ready.group_min_seqs if schedule.group_min_seqs == "auto" else schedule.group_min_seqs

        def capture() -> None:
            from toka_async.tuning.graph_sizes import GraphChoice

            assert runner.decode is not None
            model = self._describe_graphs(decoder)
            graphs = GraphChoice(runner.decode, most, least > 0, model, self.stages.show)
            graphs.use(settle(graphs, self.tuning_cache, self.groups.tensor))
            if runner.mixed is not None and max_graph_tokens:
                for done, total in runner.mixed.capture(list_mixed_sizes(max_graph_tokens), least > 0):
                    self.stages.show(done, total)

        captures = most > 0 and runner.decode is not None and runner.decode.can_capture
        warm_up(runner, self.stages, self.coords.num_micro_batches, capture if captures else None)

    def _describe_graphs(self, decoder: Decoder) -> Facts:
        """Describes on what the times of graphs depend."""
        return {
            "model": self.rank_spec,
            "ends": [decoder.embedding is not None, decoder.head is not None],
            "dtype": str(self.dtype),
            "limits": [self.limits.max_seqs, self.limits.max_context],
            "page_size": self.config.cache.page_size,
            "attention": self.config.attention.backend,
            "invariant": self.invariant,
            "ranks": [self.groups.tensor.size, self.groups.world.size],
        }


def open_tuning_cache(device: torch.device, config: Config) -> TuningCache:
    """Opens the cache of measurements, most of which depend on whether products are tuned; empty on a CPU."""
    if device.type == "cpu":
        return TuningCache(None, {})
    return TuningCache(find_folder(config.tuning.dir), {**describe_gpu(device), "tuned": config.tuning.products})


def limit_part(limits: RankLimits, num_parts: int) -> RankLimits:
    """Returns the limits of each of a step's micro-batches."""
    num_tokens = count_most_tokens(limits.max_seqs, limits.max_tokens, num_parts)
    return replace(limits, max_seqs=count_most_rows(limits.max_seqs, num_parts), max_tokens=num_tokens)


def limit_separate(limits: RankLimits, layouts: LayoutPolicy) -> RankLimits:
    """Returns the limits of products that do not overlap with exchanges; those of sampled tokens never do."""
    if not isinstance(layouts.shards, OverlappedShards):
        return limits
    return replace(limits, max_tokens=min(limits.max_tokens, max(limits.max_seqs, layouts.min_tokens - 1)))
