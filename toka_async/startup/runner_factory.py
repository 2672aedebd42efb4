"""A rank's runner out of its parts: the cache as large as memory allows, attention over it, what samples.

Knows how the parts fit together once the model is there; knows neither where it came from nor processes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import torch

from toka_async.attention.build import NOT_MEASURED, BuiltAttention, build_attention
from toka_async.attention.choice import ChoiceTable
from toka_async.attention.kv_cache import KVCache
from toka_async.attention.measure import Bench
from toka_async.checkpoint.limits import RankLimits, resolve_num_pages
from toka_async.checkpoint.spec import ModelSpec
from toka_async.config import AttentionConfig, CacheConfig, CompileConfig, ScheduleConfig
from toka_async.messages import Ready
from toka_async.model.comm import Comm
from toka_async.model.decoder import Decoder
from toka_async.runner.graphs import graph_sizes
from toka_async.runner.pipeline import StageSetup
from toka_async.runner.row_shares import RowShares
from toka_async.runner.runner import Runner
from toka_async.startup.cache_size import does_not_fit, memory_for_cache, page_bytes_of, pages_for_trial
from toka_async.startup.device import has_kernels
from toka_async.startup.memory import cpu_cache_bytes
from toka_async.startup.process_groups import ProcessGroups
from toka_async.startup.warmup import largest_load
from toka_async.tuning.store import TuningCache


@dataclass(slots=True, frozen=True)
class RunnerFactory:
    """What a runner is made of, but for the size of its cache. spec: of the rank. setup: of a pipeline's stage."""

    decoder: Decoder
    spec: ModelSpec
    meeting: ProcessGroups
    limits: RankLimits
    cache: CacheConfig
    schedule: ScheduleConfig
    attention: AttentionConfig
    compiling: CompileConfig
    dtype: torch.dtype
    device: torch.device
    tuning_cache: TuningCache
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
        auto, most = cpu_cache_bytes(self.num_sharing)
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
            settle=self._settle,
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
            async_tp_min_tokens=self.decoder.layouts.min_tokens,
        )
        compiled, num_compiles = None, None
        if self.compiling.enabled and not trial:
            from toka_async.model.compiled import compile_forward

            compiled = compile_forward(self.decoder, built.backend)
        if has_kernels(self.device):
            from toka_async.startup.compiles import CompileCounter

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
            agree=self.meeting.tensor.broadcast_first,
            shares=self._shares(),
            setup=self.setup,
        )

    def _settle(self, bench: Bench) -> ChoiceTable:
        """What attention is chosen by: as measured before, or now; on all ranks what the first one has."""
        facts = bench.facts()
        found = self.tuning_cache.find("attention", facts, ChoiceTable)
        if found is not None and not bench.admits(found):
            found = None
        table = table_of_first(self.meeting.tensor, found or bench.table())
        if found is None:
            self.tuning_cache.keep("attention", facts, table)
        return table

    def graph_sizes(self, most: int, grouped: bool) -> list[int]:
        """Rows of the graphs that an earlier start kept, of those up to `most`; empty: it is to be found out."""
        found = self.tuning_cache.find("graphs", self._of_graphs(most, grouped), list[int]) if most else None
        sizes = sorted(set(found or ()))
        if not sizes or sizes[-1] != most or not set(sizes) <= set(graph_sizes(most)):
            sizes = []
        return msgspec.json.decode(self.meeting.tensor.broadcast_first(msgspec.json.encode(sizes)), type=list[int])

    def keep_graph_sizes(self, most: int, grouped: bool, sizes: Sequence[int]) -> None:
        """For the next start."""
        if sizes:
            self.tuning_cache.keep("graphs", self._of_graphs(most, grouped), sizes)

    def _of_graphs(self, most: int, grouped: bool) -> dict[str, object]:
        """What the times of graphs depend on."""
        return {
            "model": self.spec,
            "ends": [self.decoder.embedding is not None, self.decoder.head is not None],
            "dtype": str(self.dtype),
            "limits": [self.limits.max_seqs, self.limits.max_context],
            "page_size": self.cache.page_size,
            "attention": self.attention.backend,
            "ranks": [self.meeting.tensor.size, self.meeting.world.size],
            "graphs": [most, grouped],
        }

    def _shares(self) -> RowShares | None:
        """Of the stage that samples, if it is of several ranks."""
        tensor = self.meeting.tensor
        if tensor.size == 1 or self.decoder.head is None:
            return None
        return RowShares(tensor, self.decoder.own_logits, self.limits.max_seqs)

    def _pays(self, built: BuiltAttention) -> Callable[[int, int], bool] | None:
        """What was measured, unless the configuration says; a micro-batch's part of a group may be too small for it."""
        least = self.schedule.group_min_seqs
        if least == self.schedule.group_min_tokens == "auto":
            return built.pays
        return None if least == "auto" else lambda num_rows, num_tokens: num_rows >= least  # noqa: ARG005


def group_of_first(comm: Comm, smallest: tuple[int, int]) -> tuple[int, int]:
    """The fewest rows and tokens of a group, as the first rank has it."""
    return msgspec.json.decode(comm.broadcast_first(msgspec.json.encode(smallest)), type=tuple[int, int])


def table_of_first(comm: Comm, table: ChoiceTable) -> ChoiceTable:
    """All ranks choose alike, or else they would compute a step in different ways."""
    return msgspec.json.decode(comm.broadcast_first(msgspec.json.encode(table)), type=ChoiceTable)
