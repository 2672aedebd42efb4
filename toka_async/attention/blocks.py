"""Plans a step as blocks: batches of spans, each of which is one dense attention.

What layers share is computed here, once a step: which pages are gathered, and which keys a query sees.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from toka_async.attention.base import AttentionBatch, PrefixGroup
from toka_async.attention.copies import to_device
from toka_async.attention.kv_cache import KVCache
from toka_async.attention.query_tiles import (
    QueryTiles,
    make_chunk_spans,
    make_decode_spans,
    make_prefix_spans,
    split_into_batches,
)


@dataclass(slots=True, frozen=True)
class TileLimits:
    """Bounds of a block's memory, and of when splitting work pays.

    slab_bytes: keys and values gathered at once; a CPU wants them in its cache. small_bytes: keys and values of a span,
    below which padding costs less than another block. shared_bytes: what a group must spare the reading of to be worth
    its merge. On a CPU, 4 to 64 rows that share 64 to 1024 tokens break even between 2 and 4 MB. mask_cells: query
    heads times keys of one mask. kept_cells: masks up to this size are kept for all layers.
    """

    slab_bytes: int = 1 << 23
    small_bytes: int = 1 << 16
    shared_bytes: int = 1 << 22
    mask_cells: int = 1 << 22
    kept_cells: int = 1 << 20


@dataclass(slots=True)
class DenseBlock:
    """b spans as one dense attention with t queries and m pages each, padded; l = m * page_size keys.

    tokens: int64 [b * t]; None: all of the step's tokens in order. slices: int64 [b * kv_heads * m], rows of the cache
    viewed as [pages * kv_heads, page_size * dim]. first, last: the keys that count, of the l. ends: int64 [b, t], how
    many of the l keys a query sees; None: all from first to last. bias: made from ends when small.
    """

    size: int
    tokens: Tensor | None
    slices: Tensor
    first: int
    last: int
    ends: Tensor | None
    bias: Tensor | None


@dataclass(slots=True)
class TilePlan:
    """The blocks of a step for the layers of one window."""

    window: int
    whole: list[DenseBlock]  # spans that read all that they see
    prefix: list[DenseBlock]  # the shared part of grouped rows
    own: list[DenseBlock]  # the rest of grouped rows
    grouped: Tensor | None  # int64: the grouped rows; None: there are none


class Planner:
    def __init__(self, cache: KVCache, group_size: int, limits: TileLimits) -> None:
        self.page_size = cache.page_size
        self.num_kv_heads = cache.num_kv_heads
        self.group_size = group_size
        self.limits = limits
        self.dtype, self.device = cache.dtype, cache.device
        self.page_bytes = 2 * cache.keys[0][0].numel() * self.dtype.itemsize  # as gathered
        self.heads = torch.arange(cache.num_kv_heads, device=self.device)

    def make_plans(self, batch: AttentionBatch, windows: set[int]) -> dict[int, TilePlan]:
        """Makes a plan for each window. Windows that no row outgrows share the plan without one."""
        longest = int(batch.context_lengths.max(initial=0))
        batch = self._narrow_table(batch, -(-longest // self.page_size))
        effective = {window: window if window < longest else 0 for window in windows}
        made = {window: self._plan(batch, window) for window in set(effective.values())}
        return {window: made[effective[window]] for window in windows}

    def locate_writes(self, batch: AttentionBatch) -> Tensor:
        """Locates each token's heads in the cache [pages * kv_heads * page_size, dim]: int64 [t * heads]."""
        pages = batch.write_indices // self.page_size
        offsets = batch.write_indices - pages * self.page_size
        slots = (pages[:, None] * self.num_kv_heads + self.heads) * self.page_size + offsets[:, None]
        return slots.flatten()

    def find_foreign(self, block: DenseBlock) -> Tensor | None:
        """Finds which of the l keys a span does not have: bool [b, 1, l, 1]. None: no attention takes these."""
        if block.ends is None:
            return None
        keys = torch.arange(block.last, device=self.device)
        return (keys >= block.ends.amax(1, keepdim=True))[:, None, :, None]

    def make_bias(self, ends: Tensor, num_keys: int, window: int) -> Tensor:
        """Makes 0 where a query sees a key, -inf elsewhere: [b, 1, t * group, num_keys]."""
        keys = torch.arange(num_keys, device=self.device)
        hidden = keys >= ends[..., None]  # [b, t, num_keys]
        if window:
            hidden |= keys < ends[..., None] - window
        bias = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device).masked_fill_(hidden, -torch.inf)
        return bias.repeat_interleave(self.group_size, dim=1)[:, None]

    def _narrow_table(self, batch: AttentionBatch, width: int) -> AttentionBatch:
        """Gives the batch a page table of its rows alone, in their order, as wide as the longest needs."""
        pages = batch.page_table[:, :width].index_select(0, batch.slots)
        return replace(batch, page_table=pages, slots=torch.arange(len(pages), device=pages.device))

    def _plan(self, batch: AttentionBatch, window: int) -> TilePlan:
        cells = self.limits.mask_cells // self.group_size
        groups = [group for group in batch.groups if self._is_shared(group, batch, window)]
        skip = np.zeros(batch.num_decode, dtype=np.int64)
        for group in groups:
            skip[group.first_row : group.first_row + group.num_rows] = group.num_pages
        alone, grouped = np.flatnonzero(skip == 0), np.flatnonzero(skip)
        whole = self._make_blocks(batch, make_decode_spans(batch, skip, alone, self.page_size, window), window)
        if len(batch.query_lengths) > batch.num_decode:
            whole += self._make_blocks(batch, make_chunk_spans(batch, self.page_size, window, cells), window)
        if not groups:
            return TilePlan(window, whole, [], [], None)
        shared = make_prefix_spans(groups, self.page_size, 4 * cells // self.num_kv_heads)
        return TilePlan(
            window,
            whole,
            self._make_blocks(batch, shared, 0),
            self._make_blocks(batch, make_decode_spans(batch, skip, grouped, self.page_size, window), window),
            to_device(grouped, self.device),
        )

    def _is_shared(self, group: PrefixGroup, batch: AttentionBatch, window: int) -> bool:
        """Tells whether a group is worth two parts. Every row's window must hold the whole prefix."""
        contexts = batch.context_lengths[group.first_row : group.first_row + group.num_rows]
        assert group.num_pages * self.page_size < contexts.min(), "a row's newest token is its own"
        spared = (group.num_rows - 1) * group.num_pages * self.page_bytes
        return spared > self.limits.shared_bytes and not 0 < window < contexts.max()

    def _make_blocks(self, batch: AttentionBatch, spans: QueryTiles, window: int) -> list[DenseBlock]:
        max_pages = max(1, self.limits.slab_bytes // self.page_bytes)
        small = max(1, self.limits.small_bytes // self.page_bytes)
        return [self._make_block(batch, part, window) for part in split_into_batches(spans, max_pages, small)]

    def _make_block(self, batch: AttentionBatch, spans: QueryTiles, window: int) -> DenseBlock:
        num_pages, num_queries = int(spans.num_pages.max()), int(spans.counts.max())
        steps = np.minimum(np.arange(num_queries), spans.counts[:, None] - 1)  # past a span's end: its last query
        tokens = (spans.tokens[:, None] + steps).ravel()
        ends = (spans.ends - spans.first_pages * self.page_size)[:, None] + (steps if spans.causal else 0 * steps)
        every = len(tokens) == len(batch.write_indices) and np.array_equal(tokens, np.arange(len(tokens)))
        block = DenseBlock(
            size=len(spans),
            tokens=None if every else to_device(tokens, self.device),
            slices=self._locate_slices(batch, spans, num_pages),
            first=0,
            last=num_pages * self.page_size,
            ends=None,
            bias=None,
        )
        if ends.min() == ends.max():  # all see the same keys: a slice of them instead of a mask
            block.last = int(ends[0, 0])
            block.first = max(0, block.last - window) if window else 0
            return block
        block.ends = to_device(ends, self.device)
        if ends.size * block.last * self.group_size <= self.limits.kept_cells:
            block.bias = self.make_bias(block.ends, block.last, window)
        return block

    def _locate_slices(self, batch: AttentionBatch, spans: QueryTiles, num_pages: int) -> Tensor:
        rows, first = spans.rows, spans.first_pages
        start = int(rows[0])
        if not first.any() and np.array_equal(rows, np.arange(start, start + len(rows))):
            pages = batch.page_table[start : start + len(rows), :num_pages]
        else:
            columns = np.minimum(first[:, None] + np.arange(num_pages), batch.page_table.shape[1] - 1)
            pages = batch.page_table[to_device(rows, self.device)[:, None], to_device(columns, self.device)]
        slices = pages.long()[:, None] * self.num_kv_heads + self.heads[:, None]  # [b, kv_heads, m]
        return slices.flatten()
