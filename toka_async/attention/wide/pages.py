"""Pages of a cache in E4M3 in the dtype of queries, for as long as a layer's attention runs.

Products of 16 bits have a kernel of their own on Hopper chips (`kernels.prefill_hopper`). Where many queries read the
same keys, widening these once and attending with it takes less time than to widen them for each tile of queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from toka_async.arrays import Bool, Int32, Int64
from toka_async.kernels.decode import Partial
from toka_async.kernels.prefill import PrefillConfig, attend_chunks, attend_prefixes
from toka_async.kernels.stored import widen_pages

Pages = tuple[Tensor, Tensor, Tensor, Tensor]  # keys, values, page table and slots, as kernels take them

PROGRAMS = 512  # that copy pages


@dataclass(slots=True, frozen=True)
class WideLimits:
    """Bounds of the room, and of when a copy pays.

    most_tokens, most_bytes: that fit. least_reads: query heads of a KV head that have to read a page; with fewer,
    attention gains less than the copy takes. least_rows: of all groups whose prefixes are widened; graphs of fewer rows
    launch no kernels for it.
    """

    most_tokens: int = 1 << 16
    least_reads: int = 512
    least_rows: int = 1024
    most_bytes: int = 1 << 28


class WidePages:
    """Room for pages of one layer, which stays where it is, as graphs hold its address. See also `PrefixMemory`.

    Attributes:
        config: the tiles with which queries attend over the pages.
        tile_queries: how many queries that are.
        most: pages that fit.
    """

    def __init__(
        self,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        dtype: torch.dtype,
        num_heads: int,
        config: PrefillConfig,
        limits: WideLimits | None = None,
    ) -> None:
        """keys, values: of all layers, as a `KVCache` has them. dtype: of queries, which have so many heads."""
        num_kv_heads, self.page_size, dim = keys[0].shape[1:]
        device = keys[0].device
        self.narrow = keys, values
        self.num_heads = num_heads
        self.group_size = num_heads // num_kv_heads
        self.config = config
        self.tile_queries = config.queries(self.group_size)
        self.limits = limits or WideLimits()
        page_bytes = 2 * num_kv_heads * self.page_size * dim * dtype.itemsize  # keys and values
        self.most = max(1, min(self.limits.most_tokens // self.page_size, self.limits.most_bytes // page_bytes))
        # Zeros, not empty: what is masked is still multiplied, and 0 * NaN is NaN.
        self.keys = torch.zeros((self.most, num_kv_heads, self.page_size, dim), dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        # A row for each page, which begins with it: the pages that follow are in the rows that follow.
        self.page_table = torch.arange(self.most, dtype=torch.int32, device=device)[:, None]
        self.slots = torch.arange(self.most, device=device)

    def is_worth(self, queries: Int32, contexts: Int32) -> bool:
        """Tells whether chunks of so many queries, without a window, should read wide pages of all they see."""
        reads = queries * (contexts - queries / 2) * self.group_size
        pages = -(-contexts // self.page_size)
        return bool(reads.sum() >= self.limits.least_reads * contexts.sum() and pages.sum() <= self.most)

    def choose_groups(self, num_rows: Int64, num_pages: Int64) -> Bool:
        """Chooses the groups whose prefixes are widened, as far as there is room."""
        chosen: Bool = num_rows * self.group_size >= self.limits.least_reads
        chosen &= np.cumsum(num_pages * chosen) <= self.most
        return chosen & bool(num_rows[chosen].sum() >= self.limits.least_rows)

    def count_tiles(self, num_rows: int) -> int:
        """Counts the tiles that chosen groups of so many rows have at most; each group fills one, at least."""
        return 2 * -(-num_rows // self.tile_queries) if num_rows >= self.limits.least_rows else 0

    def place(self, rows: Int64, num_pages: Int64 | Int32) -> tuple[Int64, Int64]:
        """Places the first pages of rows one after the other.

        Returns the row of each in `fill`'s answer, and int64 [1 + n, 2] for `fill`.
        """
        total = int(num_pages.sum())
        assert total <= self.most
        first = np.cumsum(num_pages, dtype=np.int64) - num_pages
        sources = np.empty((1 + total, 2), dtype=np.int64)
        sources[0] = total
        sources[1:, 0] = np.repeat(rows, num_pages)
        sources[1:, 1] = np.arange(total) - np.repeat(first, num_pages)
        return first, sources

    def fill(self, layer: int, page_table: Tensor, slots: Tensor, sources: Tensor) -> Pages:
        """Widens the pages that sources list, int32 [1 + n, 2]; returns where they are."""
        keys, values = (tensors[layer] for tensors in self.narrow)
        programs = min(PROGRAMS, max(1, len(sources) - 1))
        widen_pages(keys, values, page_table, slots, sources, self.keys, self.values, programs)
        return self.keys, self.values, self.page_table, self.slots

    def run_each_kernel(self, sinks: Tensor | None = None) -> None:
        """Runs the kernels without work, so that they are compiled. sinks: if layers have them."""
        device = self.keys.device
        zero = torch.zeros((1, 4), dtype=torch.int32, device=device)
        pages = self.fill(0, zero, zero[0].long(), zero[:, :2])
        query = self.keys.new_zeros(1, self.num_heads, self.keys.shape[-1])
        lse = torch.zeros((1, 1, self.num_heads), device=device)
        attend_prefixes(query, *pages, zero, 1, Partial(query[None], lse), 1.0, self.config)
        parts = zero[:, :3], Partial(torch.empty((0, *query.shape[1:]), device=device), lse[0, :0])
        attend_chunks(query, *pages, zero, 1, query, 1.0, 0, self.config, *parts, sinks=sinks)
