"""Attention of decoding rows over the keys that they read themselves: every decode part of ours ends with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import torch
from torch import Tensor

from toka_async.arrays import Int32, Int64
from toka_async.attention.base import AttentionBatch
from toka_async.attention.kv_cache import E4M3, KVCache
from toka_async.kernels.decode import DecodeConfig, Partial, choose_parts, decode_attention, decode_config
from toka_async.kernels.decode_work import DecodeWork, divide_alike, divide_keys, needs_parts
from toka_async.kernels.launches.pdl import list_row_counts
from toka_async.kernels.occupancy import count_resident

SHORT = 400  # keys of a row, on average, for which blocks are small
FEW_ROWS = 32  # rows of a graph below which all rows have as many parts: dividing their keys costs a launch


@dataclass(slots=True, frozen=True)
class DecodePlan:
    """skip: int32 [rows], keys that rows leave out."""

    batch: AttentionBatch
    skip: Tensor | None
    window: int
    config: DecodeConfig
    work: DecodeWork
    partial: Partial


class RowDecode:
    """Attends rows after what they skip. Holds one plan at a time."""

    def __init__(self, cache: KVCache, num_heads: int, scale: float, soft_cap: float = 0.0) -> None:
        """soft_cap: of scores, see `AttentionSpec`."""
        self.cache = cache
        self.num_heads = num_heads
        self.scale = scale
        self.soft_cap = soft_cap
        self.device = cache.device
        self.alike: dict[tuple[int, int, int], DecodeWork] = {}  # graphs hold their addresses
        self.step: DecodePlan | None = None

    @cached_property
    def programs(self) -> list[int]:
        """How many of each KV head run at once, of blocks for long rows and for short ones."""
        return [max(1, self._count_programs(is_short) // self.cache.num_kv_heads) for is_short in (False, True)]

    def plan(self, batch: AttentionBatch, lengths: Int32 | Int64, skip: Tensor | None, window: int) -> None:
        """Plans rows that read so many keys each, after those that they skip."""
        num_rows, longest, total = len(lengths), int(lengths.max(initial=1)), int(lengths.sum())
        is_short = total < SHORT * num_rows
        programs = self.programs[is_short]
        is_split = needs_parts(longest, total, num_rows, programs)
        work = divide_keys(batch.contexts, num_rows, skip, window, programs, is_split)
        self._set_plan(batch, skip, window, is_short, work)

    def plan_graph(self, batch: AttentionBatch, skip: Tensor | None, window: int) -> None:
        """Plans rows of any lengths. Rows that may skip a prefix have few keys of their own, most of the time."""
        num_rows, is_short = len(batch.slots), skip is not None
        programs = self.programs[is_short]
        if num_rows < FEW_ROWS:
            work = self._divide_alike(num_rows, *choose_parts(num_rows, programs))
        else:
            work = divide_keys(batch.contexts, num_rows, skip, window, programs)
        self._set_plan(batch, skip, window, is_short, work)

    def run(
        self,
        layer: int,
        query: Tensor,
        output: Tensor,
        prefix: Partial | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Attends from query, rotated, into output: [rows, heads, dim] each.

        prefix: of what rows skip, if they do, without the scale of values and without sinks.
        """
        step = self.step
        assert step is not None
        if not len(query):
            return
        scales = self.cache.scales[layer]
        decode_attention(
            query,
            self.cache.keys[layer],
            self.cache.values[layer],
            step.batch.page_table,
            step.batch.slots,
            step.batch.contexts,
            output,
            self.scale * scales.keys,
            step.config,
            step.work,
            step.partial,
            step.window,
            step.skip,
            prefix,
            scales.values,
            sinks,
            self.soft_cap,
        )

    def run_each_kernel(self, window: int, row_counts: Sequence[int] = (), sinks: Tensor | None = None) -> None:
        """Runs each kernel that a plan can need, on rows without keys: some odd step would compile it otherwise.

        row_counts: some of `list_row_counts`, of which each has kernels of its own; all by default. sinks: if layers
        have them.
        """
        keys = self.cache.keys[0]
        for num_rows in row_counts or list_row_counts(self.device):
            query = self.cache.make_zero_queries(num_rows, self.num_heads)
            zeros = torch.zeros((num_rows, 1), dtype=torch.int32, device=self.device)
            before = Partial(query[None], torch.zeros((1, num_rows, self.num_heads), device=self.device))
            alike = divide_alike(num_rows, 2, 1, self.device)
            for is_short, prefix in product((False, True), (None, before)):
                decode_attention(
                    query,
                    keys,
                    keys,
                    zeros,
                    zeros[:, 0].long(),
                    zeros[:, 0],
                    torch.empty_like(query),
                    self.scale,
                    self._choose_config(is_short),
                    alike,
                    self._make_partial(alike.num_partials),
                    window,
                    None if prefix is None else zeros[:, 0],
                    prefix,
                    1.0,
                    sinks,
                    self.soft_cap,
                )

    def _set_plan(
        self, batch: AttentionBatch, skip: Tensor | None, window: int, is_short: bool, work: DecodeWork
    ) -> None:
        partial = self._make_partial(work.num_partials)
        self.step = DecodePlan(batch, skip, window, self._choose_config(is_short), work, partial)

    def _make_partial(self, size: int) -> Partial:
        shape = (max(1, size), self.num_heads, self.cache.head_dim)
        return Partial(
            torch.empty(shape, dtype=torch.float32, device=self.device),
            torch.empty(shape[:2], dtype=torch.float32, device=self.device),
        )

    def _choose_config(self, is_short: bool) -> DecodeConfig:
        return decode_config(self.cache.head_dim, self.cache.dtype, is_short, self.cache.keys[0].dtype == E4M3)

    def _divide_alike(self, num_rows: int, parts: int, least: int) -> DecodeWork:
        key = (num_rows, parts, least)
        if key not in self.alike:  # made as the graph's step is computed before its capture
            self.alike[key] = divide_alike(*key, self.device)
        return self.alike[key]

    def _count_programs(self, is_short: bool) -> int:
        """Counts the programs that run at once, by one run on a row without keys; 1 if there is no GPU."""
        if self.device.type != "cuda":
            return 1
        keys, config = self.cache.keys[0], self._choose_config(is_short)
        query = self.cache.make_zero_queries(1, self.num_heads)
        zero = torch.zeros((1, 1), dtype=torch.int32, device=self.device)
        work, partial = divide_alike(1, 1, 1, self.device), self._make_partial(1)
        rows = zero, zero[0].long(), zero[0]
        kernel = decode_attention(
            query, keys, keys, *rows, query, self.scale, config, work, partial, soft_cap=self.soft_cap
        )
        return count_resident(kernel, self.device)
