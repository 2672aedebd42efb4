"""Makes a rank's runner from a model directory and the configuration: device, weights, cache, attention, warm-up.

Knows how the parts fit together; knows no processes and no sockets.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec
import torch
from torch import nn

from toka_async.attention.build import AttentionParts, BuiltAttention
from toka_async.attention.choice import ChoiceTable, every_group_pays
from toka_async.attention.flashinfer import FAILURES, explain_failure, explain_no_flashinfer
from toka_async.attention.kv_cache import E4M3, CacheFormat, KVCache, make_caches
from toka_async.attention.layered.backend import LayeredCache
from toka_async.attention.modules import ModuleRequest, find_missing, list_architectures, make_module_request
from toka_async.attention.states.build import add_states, build_states, explain_no_states
from toka_async.bar import show_nothing
from toka_async.checkpoint.division import group_experts, make_rank_spec, make_stage_spec, stage_parts
from toka_async.checkpoint.json_file import JsonFile
from toka_async.checkpoint.limits import (
    DeviceKind,
    PageBytes,
    RankLimits,
    resolve_limits,
    resolve_num_pages,
    resolve_num_snapshots,
    resolve_num_window_pages,
)
from toka_async.checkpoint.quantization import announces_cache_scales
from toka_async.checkpoint.spec import ModelError, ModelSpec
from toka_async.config import Config
from toka_async.grammars.matchers import RowMatchers, count_mask_threads
from toka_async.grammars.vocabulary import GrammarVocabulary
from toka_async.messages import Ready
from toka_async.model.activation_layout import LayoutPolicy
from toka_async.model.cache_scales import read_cache_scales
from toka_async.model.compiles import CompileCounter
from toka_async.model.decoder import RankModel
from toka_async.model.load_counter import make_load_counter
from toka_async.model.matrices.blocked_ops import BlockedOps
from toka_async.model.matrices.ops import Ops, TorchOps
from toka_async.model.ordered_sums import OrderedSums
from toka_async.model.sampling import sample, sample_alone
from toka_async.model.weights import load_weights, random_weights, weight_files
from toka_async.runner.graphs import DENSE_ROWS
from toka_async.runner.pipeline import StageSetup
from toka_async.runner.runner import Runner, SamplingSetup
from toka_async.runner.samples import RowShares
from toka_async.startup.build_model import build_model
from toka_async.startup.cache_size import (
    check_largest_step,
    choose_shares,
    compute_cache_memory,
    count_graph_bytes,
    count_graph_rows,
    count_graph_tokens,
    count_page_bytes,
    count_row_bytes,
    count_token_bytes,
    count_trial_pages,
    fit_limits,
    limit_part,
    limit_separate,
    make_misfit_error,
)
from toka_async.startup.compile_ahead import compile_ahead, count_compile_threads, list_compile_tasks
from toka_async.startup.described import count_weight_bytes, describe_device
from toka_async.startup.device import (
    check_stored_dtype,
    check_weight_formats,
    has_kernels,
    name_dtype,
    name_gpus,
    name_types,
    open_tuning_cache,
    resolve_device,
    resolve_dtype,
    resolve_num_threads,
    resolve_stored_dtype,
)
from toka_async.startup.memory import choose_cpu_cache_bytes
from toka_async.startup.module_compiler import compile_in_background, compile_now
from toka_async.startup.process_groups import build_links, make_groups
from toka_async.startup.progress import StartupProgress
from toka_async.startup.rank_attention import AttentionSetup, build_rank_attention
from toka_async.startup.rank_coords import ALONE, RankCoords
from toka_async.startup.token_time import measure_token_seconds
from toka_async.startup.warmup import make_largest_load, warm_up
from toka_async.startup.weights_fit import catch_lost_memory, check_weights_fit, measure_free_bytes
from toka_async.tuning.async_tp import RankShape, build_layouts
from toka_async.tuning.attention import AttentionChoice
from toka_async.tuning.capture_trial import can_be_captured
from toka_async.tuning.product_loads import load_products
from toka_async.tuning.settle import settle
from toka_async.tuning.store import Facts
from toka_async.weights.rank_control import RankControl, SleepingCache

if TYPE_CHECKING:  # needs Triton, which is not everywhere
    from toka_async.tuning.gemm import ProductTuning

logger = logging.getLogger(__name__)


class RunnerFactory:
    """Makes one runner. Ranks of one model must be built at the same time: they wait for each other."""

    def __init__(
        self,
        model_dir: Path,
        spec: ModelSpec,
        config: Config,
        coords: RankCoords = ALONE,
        stages: StartupProgress | None = None,
        compiles_first: bool = True,
        lock_gpu: Callable[[Sequence[str]], None] = lambda _uuids: None,
        vocabulary: GrammarVocabulary | None = None,
    ) -> None:
        """Connects to the other ranks. Raises ModelError that names the field and the fix.

        stages: shows the start; None: nobody looks. compiles_first: FlashInfer's missing modules are compiled before
        the runner is ready, not in the background afterwards. lock_gpu: called with the UUIDs of this machine's
        ranks before the GPU is used. vocabulary: for grammars; None: no request has one.
        """
        self.model_dir = model_dir
        spec = msgspec.structs.replace(spec, fp32_logits=config.model.fp32_logits)
        self.spec = spec = group_experts(spec, config.parallel.ep)
        self.config = config
        self.coords = coords
        self.stages = stages or StartupProgress(shown=False, logged=False)
        self.compiles_first = compiles_first
        self.vocabulary = vocabulary
        self.left_to_compile: ModuleRequest | None = None
        self.flashinfer_failed = False
        self.decoder: RankModel | None = None  # of what was built last
        others = " and meeting the other ranks" if coords.world_size > 1 else ""
        with self.stages.stage("device", f"starting the device{others}"):
            self.device = resolve_device(config.model, coords)
            if self.device.type == "cuda":
                lock_gpu(name_gpus(coords.num_sharing))
            self.groups = make_groups(coords, self.device)
        check_weight_formats(spec, self.device)
        reason = explain_no_states(self.device, config.model.batch_invariant) if spec.recurrences else ""
        if reason:
            raise ModelError(reason)
        self.kind: DeviceKind = "cuda" if self.device.type == "cuda" else "cpu"
        self.invariant = config.model.batch_invariant
        if self.invariant and coords.size > 1:
            self.groups = replace(self.groups, tensor=OrderedSums(self.groups.tensor))
        self.dtype = resolve_dtype(config.model, spec, self.device)
        check_stored_dtype(config.cache, self.device)
        self.cache_format = CacheFormat(resolve_stored_dtype(config.cache, self.dtype))  # scales come with the weights
        self.limits = resolve_limits(config.model, config.schedule, spec, self.kind)
        self.spec = spec = spec.fit_context(self.limits.max_context).store_states(config.cache.state_dtype)
        self.part = stage_parts(spec, coords.num_stages, coords.size)[coords.stage]
        self.rank_spec = make_stage_spec(make_rank_spec(spec, coords.size), self.part)
        # Only the last stage has logits.
        vocab_size = self.rank_spec.vocab_size if self.part.is_last else 0
        self.counted_spec = msgspec.structs.replace(self.rank_spec, vocab_size=vocab_size)
        free = measure_free_bytes(self.device, config.cache.memory_fraction)
        check_weights_fit(spec, self.part, coords.size, self.dtype, free, self.kind)
        self.tuning_cache = open_tuning_cache(self.device, config)
        self.ops = self._make_ops()
        self.tuning = self._make_tuning()

    def build(self) -> Runner:
        """Builds the runner, ready for its first step. Raises ModelError."""
        with self.stages.stage("tensor ranks", "measuring layers in shards") if self.coords.size > 1 else nullcontext():
            layouts = self._build_layouts()
        with (
            self.stages.stage("weights", "loading"),
            catch_lost_memory(self.spec, self.part, self.coords.size, self.dtype),
        ):
            self.decoder = decoder = self._load_decoder(layouts)
        if self.kind == "cuda":
            self.limits = self._fit_limits()
        else:
            self._set_num_threads(decoder)
        stage = self._connect_stage()
        max_graph_rows, max_graph_tokens = self._count_graph_rows(layouts), self._count_graph_tokens(layouts)
        if self.tuning is not None:
            with self.stages.stage("matrices", "measuring products"):
                self.tuning.tune(decoder, self._limit_products(layouts), max_graph_rows, self.stages.show)
        with_flashinfer = self._prepare_flashinfer()
        with self.stages.stage("memory", "computing the largest step" if self.kind == "cuda" else ""):
            num_pages, max_graph_rows = self._count_pages(
                decoder, stage, with_flashinfer, max_graph_rows, max_graph_tokens
            )
            num_pages = self.groups.world.minimum(num_pages)
        with self.stages.stage("attention", "allocating the cache"):
            runner = self._make_runner(decoder, stage, num_pages, with_flashinfer, self._choose_table)
            token_seconds = self._measure_token_seconds(runner)
        self._warm_up(runner, decoder, max_graph_rows, max_graph_tokens)
        self.stages.report()
        self.tuning_cache.report()
        described = describe_device(
            self.coords.world_rank,
            self.device,
            name_types(self.spec, self.dtype, self.config.cache),
            count_weight_bytes(cast(nn.Module, decoder)),
            _list_caches(runner),
        )
        runner.ready = msgspec.structs.replace(runner.ready, ranks=(described,), token_seconds=token_seconds)
        if self.left_to_compile is not None and self.coords.device_index == 0:  # once for all ranks and replicas
            compile_in_background(self.left_to_compile)
        return runner

    def make_control(self, runner: Runner, rank: int, number: int) -> RankControl:
        """Makes what a trainer controls. rank: in the replica. number: among all ranks of all replicas."""
        assert self.decoder is not None

        def build_whole(dtype: torch.dtype) -> RankModel:
            return build_model(self.spec, self.model_dir, self.config.model, dtype, torch.device("meta"))

        return RankControl(self.decoder, build_whole, _list_caches(runner), rank, number)

    def describe_kept(self) -> str:
        """Describes what a build left on the disk for later starts, and what it could not leave there."""
        if self.kind == "cpu":
            return "a CPU compiles and measures nothing"
        missing = ["measurements"] * (not self.tuning_cache.keeps) + ["FlashInfer's modules"] * self.flashinfer_failed
        if not missing:
            return "all of it is on the disk"
        return f"all is on the disk except {' and '.join(missing)}; the next start repeats that"

    def _prepare_flashinfer(self) -> bool:
        """Tells whether attention may use FlashInfer. Its missing modules are compiled now, or left for later.

        A running server takes no new modules over: their buffers are not in the memory that the cache was sized by, and
        measuring would stop the steps of all ranks for seconds. The next start measures them. Raises ModelError if
        FlashInfer must be used and does not work.
        """
        backend = self.config.attention.backend
        if self.invariant or backend not in ("auto", "flashinfer"):
            return True
        kinds = self.spec.attention_kinds
        if any(explain_no_flashinfer(self.device, self.dtype, kind.head_dim, kind.soft_cap) for kind in kinds):
            return True  # building attention says so where it matters
        is_there, reason = False, ""
        with self.stages.stage("FlashInfer", "looking for its modules"):
            try:
                whole = make_rank_spec(self.spec, self.coords.size)  # other stages may have other windows
                types = name_dtype(self.dtype), name_dtype(self.cache_format.dtype)
                request = make_module_request(whole, *types, list_architectures())
                is_there = not find_missing(request)
                if not is_there and (self.compiles_first or backend == "flashinfer"):
                    compile_now(request, self.stages.show)
                    is_there = True
                if not is_there:
                    self.left_to_compile = request
            except FAILURES as error:
                reason = explain_failure(error)
        if reason and backend == "flashinfer":
            raise ModelError(f"attention.backend=flashinfer: it does not work here: {reason}; use auto")
        if reason:
            self.flashinfer_failed = True
            logger.warning("attention.backend=auto: FlashInfer does not work here, so it is not used: %s", reason)
        return bool(self.groups.world.minimum(int(is_there)))

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
            show=self.stages.show,
        )

    def _count_graph_rows(self, layouts: LayoutPolicy | None = None) -> int:
        """Counts the rows of the largest graph; 0: none is captured. Steps in shards are not captured.

        Automatic sizes above DENSE_ROWS do not decide about layouts.
        """
        max_seqs, total = limit_part(self.limits, self.coords.num_micro_batches).max_seqs, 0
        if layouts is not None and has_kernels(self.device):
            total = torch.cuda.get_device_properties(self.device).total_memory
        most = count_graph_rows(self.config.graphs, self.counted_spec, self.dtype, total, max_seqs)
        most = self.groups.world.minimum(most)
        return most if layouts is None or layouts.shards is None else min(most, layouts.min_tokens - 1)

    def _count_graph_tokens(self, layouts: LayoutPolicy) -> int:
        """Counts the tokens of the largest graph of steps with prompts, alike on all ranks; 0: none is captured."""
        if not has_kernels(self.device) or self.invariant:
            return 0
        total = torch.cuda.get_device_properties(self.device).total_memory
        max_tokens = limit_part(self.limits, self.coords.num_micro_batches).max_tokens
        most = count_graph_tokens(self.config.graphs, self.rank_spec, self.dtype, total, max_tokens)
        most = self.groups.world.minimum(most)
        return most if layouts.shards is None else min(most, layouts.min_tokens - 1)

    def _load_decoder(self, layouts: LayoutPolicy) -> RankModel:
        decoder = build_model(
            self.spec,
            self.model_dir,
            self.config.model,
            self.dtype,
            self.device,
            self.groups.tensor,
            self.ops,
            layouts,
            self.part,
        )
        num_threads = count_compile_threads(self.coords.num_sharing)
        with compile_ahead(self._list_compile_tasks(decoder, layouts), self.device, num_threads):
            if self.config.model.load == "random":
                random_weights(decoder, 0, self.stages.show)
            else:
                load_weights(decoder, self.model_dir, self.stages.show)
                if self.cache_format.dtype == E4M3:
                    announced = announces_cache_scales(JsonFile(self.model_dir / "config.json"))
                    scales = read_cache_scales(weight_files(self.model_dir), self.part, announced)
                    self.cache_format = replace(self.cache_format, scales=scales)
            self.stages.show(0, 0, "loaded; waiting for kernels that are compiled meanwhile")
        if self.spec.impl != "native" and has_kernels(self.device) and self.config.graphs.enabled:
            self._try_capture(decoder)
        return decoder

    def _try_capture(self, decoder: RankModel) -> None:
        """Leaves out graphs if a model's code, which is not ours, cannot be captured on every rank."""
        width = 0 if self.part.is_first else self.spec.passed_size
        can_capture = can_be_captured(decoder, self.rank_spec.attention.num_heads, width, self.dtype, self.device)
        if not self.groups.world.minimum(int(can_capture)):
            logger.warning("the model's code cannot be captured in CUDA graphs: decoding takes longer")
            graphs = msgspec.structs.replace(self.config.graphs, enabled=False)
            self.config = msgspec.structs.replace(self.config, graphs=graphs)

    def _list_compile_tasks(self, decoder: RankModel, layouts: LayoutPolicy) -> list[Callable[[], None]]:
        """Lists what compiles kernels while weights load. Tensor ranks and other stages do not draw from all logits."""
        if self.invariant:
            return []  # its attention has other kernels
        draws = self.coords.size == 1 and self.part.is_last
        spec = self.rank_spec if draws else msgspec.structs.replace(self.rank_spec, vocab_size=0)
        backend, page_size = self.config.attention.backend, self.config.cache.page_size
        tasks = list_compile_tasks(spec, self.dtype, self.cache_format.dtype, self.device, backend, page_size)
        return tasks if self.tuning is None else tasks + self.tuning.list_builds(decoder, self._limit_products(layouts))

    def _limit_products(self, layouts: LayoutPolicy) -> RankLimits:
        """Returns the limits of the products that are tuned."""
        return limit_separate(limit_part(self.limits, self.coords.num_micro_batches), layouts)

    def _set_num_threads(self, decoder: RankModel) -> None:
        num_parameters = sum(parameter.numel() for parameter in decoder.parameters())
        num_threads = resolve_num_threads(self.config.attention, num_parameters, self.coords.num_sharing)
        torch.set_num_threads(num_threads)

    def _fit_limits(self) -> RankLimits:
        """Lowers limits that are `auto` until the largest step fits every rank's GPU. Raises ModelError."""
        cache, schedule, world = self.config.cache, self.config.schedule, self.groups.world
        num_parts = self.coords.num_micro_batches
        shares = choose_shares(schedule)

        def check(tried: RankLimits) -> None:
            check_largest_step(self.counted_spec, tried, self.dtype, cache, self.device, shares, num_parts)

        row = count_row_bytes(self.counted_spec, self.limits, self.dtype, cache.page_size, num_parts)
        row += self.counted_spec.count_state_bytes(self.dtype.itemsize)
        token = count_token_bytes(self.counted_spec, self.dtype, num_parts, self.cache_format.dtype)
        fitting = fit_limits(self.limits, schedule, check, row, token)
        return replace(fitting, max_seqs=world.minimum(fitting.max_seqs), max_tokens=world.minimum(fitting.max_tokens))

    def _connect_stage(self) -> StageSetup | None:
        """Connects this rank's stage, before memory is measured, as links take some; None without a pipeline."""
        if self.groups.pairs is None:
            return None
        size, num_parts = self.spec.passed_size, self.coords.num_micro_batches
        num_tokens = limit_part(self.limits, num_parts).max_tokens
        links = build_links(self.groups.pairs, self.groups.tensor, size, self.dtype, num_tokens, self.limits.max_seqs)
        return StageSetup(links, num_parts, size, self.dtype, self.device)

    def _count_pages(
        self,
        decoder: RankModel,
        stage: StageSetup | None,
        with_flashinfer: bool,
        max_graph_rows: int,
        max_graph_tokens: int,
    ) -> tuple[int, int]:
        """Counts the pages of this rank's cache: as configured, or as memory allows beside steps and graphs.

        Also returns the rows of the largest graph, of those up to max_graph_rows that pay.
        """
        page_bytes = count_page_bytes(self.rank_spec, self.config.cache, self.dtype, self.spec.window)
        if self.kind == "cuda":
            auto, max_graph_rows = self._measure_memory(
                decoder, stage, page_bytes, with_flashinfer, max_graph_rows, max_graph_tokens
            )
            most = auto
        else:
            auto, most = choose_cpu_cache_bytes(self.coords.num_sharing)
        return resolve_num_pages(self.config.cache, self.limits, page_bytes, auto, most), max_graph_rows

    def _measure_memory(
        self,
        decoder: RankModel,
        stage: StageSetup | None,
        page_bytes: PageBytes,
        with_flashinfer: bool,
        max_graph_rows: int,
        max_graph_tokens: int,
    ) -> tuple[int, int]:
        """Measures the bytes that the largest step and graphs leave to the cache, by computing that step once.

        Also returns the rows of the largest graph, see `_limit_graphs`.
        """
        cache = self.config.cache
        torch.cuda.reset_peak_memory_stats(self.device)
        num_pages = count_trial_pages(self.limits, cache, page_bytes, self.device)
        try:
            runner = self._make_runner(decoder, stage, num_pages, with_flashinfer)
            make_largest_load(runner.ready)(runner)
            torch.cuda.synchronize(self.device)
        except torch.OutOfMemoryError:
            raise make_misfit_error(self.limits) from None
        peak = torch.cuda.max_memory_allocated(self.device) - page_bytes.count(cache, self.limits, num_pages)
        num_rows, num_tokens = self._limit_graphs(runner, decoder, max_graph_rows, max_graph_tokens)
        of_graphs = count_graph_bytes(self.counted_spec, self.dtype, num_rows, num_tokens)
        del runner
        gc.collect()
        torch.cuda.empty_cache()
        return compute_cache_memory(self.device, cache.memory_fraction, peak) - of_graphs, num_rows

    def _limit_graphs(self, runner: Runner, decoder: RankModel, most_rows: int, most_tokens: int) -> tuple[int, int]:
        """Finds the rows and tokens of the largest graphs that can be captured and pay, with a runner for a trial."""
        decode = runner.decode
        if decode is None or not decode.can_capture:
            return 0, 0
        num_tokens = most_tokens if most_rows and runner.mixed is not None else 0
        if self.config.graphs.max_rows != "auto" or most_rows <= DENSE_ROWS:
            return most_rows, num_tokens
        from toka_async.tuning.graph_sizes import GraphLimit

        limit = GraphLimit(decode, most_rows, self._describe_graphs(decoder))
        return settle(limit, self.tuning_cache, self.groups.tensor), num_tokens

    def _make_runner(
        self,
        decoder: RankModel,
        stage: StageSetup | None,
        num_pages: int,
        with_flashinfer: bool,
        choose: Callable[[AttentionParts], ChoiceTable] | None = None,
    ) -> Runner:
        """Makes a runner over a new cache. choose: see `build_attention`; None: the runner is for a trial."""
        spec, limits, page_size = self.rank_spec, self.limits, self.config.cache.page_size
        show = show_nothing if choose is None else self.stages.show
        can_sleep = choose is not None  # a trial's cache is counted as torch's memory
        window = self.spec.window
        num_window_pages = resolve_num_window_pages(self.config.cache, limits, window, num_pages)
        # One page more, for rows that only fill up a batch.
        stored = self.dtype, self.device, show, self.cache_format, can_sleep
        caches = make_caches(spec, num_pages + 1, page_size, *stored, num_window_pages + 1)
        cache = caches[0] if len(caches) == 1 else LayeredCache(caches)
        setup = AttentionSetup(self.config.attention.backend, self.invariant, limits, choose, with_flashinfer, show)
        attention = build_rank_attention(spec, caches, setup)
        num_snapshots = resolve_num_snapshots(self.config.cache, self.spec, limits.max_seqs)
        states = build_states(spec, limits.max_seqs, num_snapshots, self.dtype, self.device, can_sleep)
        if states is not None:
            attention = add_states(attention, states)
        group_min_seqs, group_min_tokens = self.groups.world.agree(attention.smallest_group, tuple[int, int])
        ready = Ready(
            num_pages=num_pages,
            page_size=page_size,
            max_seqs=limits.max_seqs,
            max_context=limits.max_context if choose is None else min(limits.max_context, num_pages * page_size),
            vocab_size=spec.vocab_size,
            max_tokens=limits.max_tokens,
            num_snapshots=num_snapshots,
            num_window_pages=num_window_pages,
            window=window,
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
                self._make_matchers(),
            ),
            stage,
            compiles,
            make_load_counter(decoder, self.device),
            states,
        )

    def _make_matchers(self) -> RowMatchers | None:
        if self.vocabulary is None:
            return None
        return RowMatchers(self.vocabulary, self.limits.max_seqs, count_mask_threads(self.coords.num_sharing))

    def _choose_table(self, parts: AttentionParts) -> ChoiceTable:
        """Chooses the same table on all ranks of a stage, or they would compute a step in different ways."""
        return settle(AttentionChoice(parts, show=self.stages.show), self.tuning_cache, self.groups.tensor)

    def _make_group_rule(self, attention: BuiltAttention) -> Callable[[int, int], bool]:
        """Decides which groups pay, as configured or measured. A micro-batch may have too small a part of one."""
        schedule, least = self.config.schedule, self.config.schedule.group_min_seqs
        if least == schedule.group_min_tokens == "auto":
            return attention.pays
        return every_group_pays if least == "auto" else lambda num_rows, num_tokens: num_rows >= least  # noqa: ARG005

    def _share_rows(self, decoder: RankModel) -> RowShares | None:
        """Divides the rows to sample among ranks; None: this rank is alone, or its stage does not sample."""
        tensor = self.groups.tensor
        if tensor.size == 1 or decoder.head is None:
            return None
        return RowShares(tensor, decoder.own_logits, self.limits.max_seqs)

    def _measure_token_seconds(self, runner: Runner) -> float:
        """Measures the seconds of a prompt's token, the same on all ranks; 0 on a CPU, where that would take long."""
        if self.kind == "cpu":
            return 0.0
        return self.groups.world.agree(measure_token_seconds(runner), float)

    def _warm_up(self, runner: Runner, decoder: RankModel, max_graph_rows: int, max_graph_tokens: int) -> None:
        """Computes every kind of step, and captures graphs."""
        schedule, most = self.config.schedule, min(max_graph_rows, self.limits.max_seqs)
        least = runner.ready.group_min_seqs if schedule.group_min_seqs == "auto" else schedule.group_min_seqs

        def capture() -> None:
            from toka_async.runner.mixed import list_mixed_sizes
            from toka_async.tuning.graph_sizes import GraphChoice

            assert runner.decode is not None
            graphs = GraphChoice(runner.decode, most, least, self._describe_graphs(decoder), self.stages.show)
            graphs.use(settle(graphs, self.tuning_cache, self.groups.tensor))
            if runner.mixed is not None and max_graph_tokens:
                for done, total in runner.mixed.capture(list_mixed_sizes(max_graph_tokens), least > 0):
                    self.stages.show(done, total, "graphs captured")

        if has_kernels(self.device):
            with self.stages.stage("products", "loading a library's kernels"):
                load_products(decoder, self.limits, self.dtype, self.device)
        captures = most > 0 and runner.decode is not None and runner.decode.can_capture
        warm_up(runner, self.stages, self.coords.num_micro_batches, capture if captures else None)

    def _describe_graphs(self, decoder: RankModel) -> Facts:
        """Describes on what the times of graphs depend."""
        return {
            "model": self.rank_spec,
            "ends": [decoder.embedding is not None, decoder.head is not None],
            "dtype": str(self.dtype),
            "cache": str(self.cache_format.dtype),
            "limits": [self.limits.max_seqs, self.limits.max_context],
            "page_size": self.config.cache.page_size,
            "attention": self.config.attention.backend,
            "invariant": self.invariant,
            "ranks": [self.groups.tensor.size, self.groups.world.size],
        }


def _list_caches(runner: Runner) -> list[SleepingCache]:
    assert isinstance(runner.cache, KVCache | LayeredCache)
    return [runner.cache] if runner.states is None else [runner.cache, runner.states]
