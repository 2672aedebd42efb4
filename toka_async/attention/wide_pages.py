"""Pages of an E4M3 cache in the dtype of queries, for as long as a layer's attention runs.

On Hopper chips products of 16 bits have a kernel of their own (`kernels.prefill_hopper`). Where many queries read the
same keys, widening these once and attending with it takes less time than reading E4M3.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from toka_async.arrays import Bool, Int64
from toka_async.attention.kv_cache import KVCache
from toka_async.kernels.decode import Partial
from toka_async.kernels.prefill import PrefillConfig, attend_chunks, attend_prefixes
from toka_async.kernels.widen import widen_pages

Pages = tuple[Tensor, Tensor, Tensor, Tensor]  # keys, values, page table and slots, as kernels take them

PROGRAMS = 512  # that copy pages


@dataclass(slots=True, frozen=True)
class WideLimits:
    """Bounds of the room, and of when a copy pays.

    most_tokens: that fit. least_reads: query heads of a KV head that have to read a page; with fewer, attention gains
    less than the copy takes. least_rows: of all groups whose prefixes are widened; graphs of fewer rows launch no
    kernels for it.
    """

    most_tokens: int = 1 << 16
    least_reads: int = 512
    least_rows: int = 1024


class WidePages:
    """Room for pages of one layer. It stays where it is, as graphs hold its address. Parts of one stream may share it.

    Attributes:
        config: the tiles with which queries attend over the pages.
        tile_queries: how many queries that are.
    """

    def __init__(self, cache: KVCache, num_heads: int, config: PrefillConfig, limits: WideLimits) -> None:
        self.num_heads = num_heads
        self.group_size = num_heads // cache.num_kv_heads
        self.page_size = cache.page_size
        self.config = config
        self.tile_queries = config.queries(self.group_size)
        self.limits = limits
        self.most = max(1, limits.most_tokens // cache.page_size)
        shape = (self.most, cache.num_kv_heads, cache.page_size, cache.head_dim)
        self.cache = cache
        # Zeros, not empty: what is masked is still multiplied, and 0 * NaN is NaN.
        self.keys = torch.zeros(shape, dtype=cache.dtype, device=cache.device)
        self.values = torch.zeros(shape, dtype=cache.dtype, device=cache.device)
        # A row that begins at a page: its pages are those that follow.
        self.page_table = torch.arange(self.most, dtype=torch.int32, device=cache.device)[:, None]
        self.slots = torch.arange(self.most, device=cache.device)

    def is_worth(self, queries: Int64, contexts: Int64) -> bool:
        """Tells whether chunks of so many queries, without a window, should read wide pages of all they see."""
        reads = queries * (contexts - queries / 2) * self.group_size
        pages = -(-contexts // self.page_size)
        return bool(reads.sum() >= self.limits.least_reads * contexts.sum() and pages.sum() <= self.most)

    def choose_groups(self, num_rows: Int64, num_pages: Int64) -> Bool:
        """Chooses the groups whose prefixes are widened, as far as there is room."""
        chosen: Bool = num_rows * self.group_size >= self.limits.least_reads
        chosen &= np.cumsum(num_pages * chosen) <= self.most
        return chosen & bool(num_rows[chosen].sum() >= self.limits.least_rows)

    def place(self, rows: Int64, num_pages: Int64) -> tuple[Int64, Int64]:
        """Places the first pages of rows one after the other.

        Returns the first page of each here, its row in `fill`'s answer, and int64 [1 + n, 2] for `fill`.
        """
        total = int(num_pages.sum())
        assert total <= self.most
        first = np.cumsum(num_pages) - num_pages
        sources = np.empty((1 + total, 2), dtype=np.int64)
        sources[0] = total
        sources[1:, 0] = np.repeat(rows, num_pages)
        sources[1:, 1] = np.arange(total) - np.repeat(first, num_pages)
        return first, sources

    def fill(self, layer: int, page_table: Tensor, slots: Tensor, sources: Tensor) -> Pages:
        """Widens the pages that sources list, int32 [1 + n, 2]; returns where they are."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        programs = min(PROGRAMS, max(1, len(sources) - 1))
        widen_pages(keys, values, page_table, slots, sources, self.keys, self.values, programs)
        return self.keys, self.values, self.page_table, self.slots

    def run_each_kernel(self) -> None:
        """Runs the kernels without work, so that they are compiled."""
        device = self.cache.device
        zero = torch.zeros((1, 4), dtype=torch.int32, device=device)
        pages = self.fill(0, zero, zero[0].long(), zero[:, :2].contiguous())
        query = self.cache.make_zero_queries(1, self.num_heads)
        lse = torch.zeros((1, 1, self.num_heads), device=device)
        attend_prefixes(query, *pages, zero, 1, Partial(query[None], lse), 1.0, self.config)
        none = Partial(torch.empty((0, *query.shape[1:]), device=device), lse[0, :0])
        attend_chunks(query, *pages, zero, 1, query, 1.0, 0, self.config, zero[:, :3], none)
