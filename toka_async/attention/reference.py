"""Paged attention in plain torch, for any device: what other backends are checked against, and the one for CPUs.

A step is planned as blocks: batches of spans (runs of queries that read a run of pages) of similar size. A block
gathers its pages once and is one dense attention. Rows of a group with a shared prefix (Hydragen, arXiv:2402.05099)
are computed in two parts, prefix and own, merged by their log-sum-exp in float32. Knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from toka_async.arrays import Int64
from toka_async.attention.base import AttentionBatch, PrefixGroup
from toka_async.attention.kv_cache import KVCache
from toka_async.attention.spans import Spans, batches, chunk_spans, decode_spans, prefix_spans

SLAB_BYTES = 1 << 26  # of keys and values gathered at once
SMALL_BYTES = 1 << 16  # of keys and values of a span, below which padding costs less than another block
SHARED_BYTES = 1 << 18  # that a group must spare the reading of, to be worth its merge
MASK_CELLS = 1 << 22  # query heads times keys of one block's mask
KEPT_CELLS = 1 << 20  # masks up to this size are kept for all layers; larger ones are made in each


@dataclass(slots=True)
class Block:
    """b spans as one dense attention with t queries and m pages each, padded; l = m * page_size keys.

    tokens: int64 [b * t], None: all of the step's tokens in order. slices: int64 [b * kv_heads * m], rows of the cache
    viewed as [pages * kv_heads, page_size * dim]. first, last: the keys that count, of the l. ends: int64 [b, t],
    how many of the l keys a query sees; None: all from first to last. bias: made from ends when small.
    """

    size: int
    tokens: Tensor | None
    slices: Tensor
    first: int
    last: int
    ends: Tensor | None
    bias: Tensor | None


@dataclass(slots=True)
class Plan:
    """The blocks of a step for the layers of one window."""

    window: int
    whole: list[Block]  # spans that see all of their keys
    prefix: list[Block]  # the shared part of grouped rows
    own: list[Block]  # the rest of grouped rows
    grouped: Tensor | None  # int64: the grouped rows


class ReferenceAttention:
    """`AttentionBackend` over a `KVCache`, with a sliding window per layer (0: none)."""

    def __init__(
        self,
        cache: KVCache,
        num_heads: int,
        windows: Sequence[int],
        scale: float | None = None,
        shared_bytes: int = SHARED_BYTES,
    ) -> None:
        assert num_heads % cache.num_kv_heads == 0
        self.cache = cache
        self.num_heads = num_heads
        self.group_size = num_heads // cache.num_kv_heads
        self.windows = tuple(windows)
        self.scale = scale if scale is not None else cache.head_dim**-0.5
        self.shared_bytes = shared_bytes
        self.dtype, self.device = cache.keys[0].dtype, cache.keys[0].device
        self.page_bytes = 2 * cache.num_kv_heads * cache.page_size * cache.head_dim * self.dtype.itemsize
        self.heads = torch.arange(cache.num_kv_heads, device=self.device)
        self.plans: dict[int, Plan] = {}
        self.write_slots = torch.empty(0, dtype=torch.int64, device=self.device)

    # ---- once a step ----

    def plan(self, batch: AttentionBatch) -> None:
        cache = self.cache
        pages = batch.write_indices // cache.page_size
        offsets = batch.write_indices - pages * cache.page_size
        slots = (pages[:, None] * cache.num_kv_heads + self.heads) * cache.page_size + offsets[:, None]
        self.write_slots = slots.flatten()
        longest = int(batch.context_lengths.max(initial=0))
        plans: dict[int, Plan] = {}
        for window in set(self.windows):
            effective = window if window < longest else 0
            if effective not in plans:
                plans[effective] = self._plan(batch, effective)
            plans[window] = plans[effective]
        self.plans = plans

    def _plan(self, batch: AttentionBatch, window: int) -> Plan:
        size, cells = self.cache.page_size, MASK_CELLS // self.group_size
        groups = [group for group in batch.groups if self._is_shared(group, batch, window)]
        skip = np.zeros(batch.num_decode, dtype=np.int64)
        for group in groups:
            skip[group.first_row : group.first_row + group.num_rows] = group.num_pages
        alone, grouped = np.flatnonzero(skip == 0), np.flatnonzero(skip)
        whole = self._blocks(batch, decode_spans(batch, skip, alone, size, window), window)
        whole += self._blocks(batch, chunk_spans(batch, size, window, cells), window)
        if not groups:
            return Plan(window, whole, [], [], None)
        shared = prefix_spans(groups, size, 4 * cells // self.cache.num_kv_heads)
        return Plan(
            window,
            whole,
            self._blocks(batch, shared, window),
            self._blocks(batch, decode_spans(batch, skip, grouped, size, window), window),
            self._upload(grouped),
        )

    def _is_shared(self, group: PrefixGroup, batch: AttentionBatch, window: int) -> bool:
        """Worth two parts, and the whole prefix in every row's window."""
        contexts = batch.context_lengths[group.first_row : group.first_row + group.num_rows]
        spared = (group.num_rows - 1) * group.num_pages * self.page_bytes
        assert group.num_pages * self.cache.page_size < contexts.min(), "a row's newest token is its own"
        return spared > self.shared_bytes and not 0 < window < contexts.max()

    def _blocks(self, batch: AttentionBatch, spans: Spans, window: int) -> list[Block]:
        max_pages, small = max(1, SLAB_BYTES // self.page_bytes), max(1, SMALL_BYTES // self.page_bytes)
        return [self._block(batch, part, window) for part in batches(spans, max_pages, small)]

    def _block(self, batch: AttentionBatch, spans: Spans, window: int) -> Block:
        page_size = self.cache.page_size
        num_pages, num_queries = int(spans.num_pages.max()), int(spans.counts.max())
        steps = np.minimum(np.arange(num_queries), spans.counts[:, None] - 1)  # past a span's end: its last query
        tokens = (spans.tokens[:, None] + steps).ravel()
        ends = (spans.ends - spans.first_pages * page_size)[:, None] + (steps if spans.causal else 0 * steps)
        every = len(tokens) == len(batch.write_indices) and np.array_equal(tokens, np.arange(len(tokens)))
        block = Block(
            size=len(spans),
            tokens=None if every else self._upload(tokens),
            slices=self._slices(batch, spans, num_pages),
            first=0,
            last=num_pages * page_size,
            ends=None,
            bias=None,
        )
        if ends.min() == ends.max():  # all see the same keys: a slice of them instead of a mask
            block.last = int(ends[0, 0])
            block.first = max(0, block.last - window) if window else 0
        else:
            block.ends = self._upload(ends)
            if ends.size * block.last * self.group_size <= KEPT_CELLS:
                block.bias = self._bias(block.ends, block.last, window)
        return block

    def _slices(self, batch: AttentionBatch, spans: Spans, num_pages: int) -> Tensor:
        rows, first = spans.rows, spans.first_pages
        if not first.any() and np.array_equal(rows, np.arange(rows[0], rows[0] + len(rows))):
            pages = batch.page_table[int(rows[0]) : int(rows[0]) + len(rows), :num_pages]
        else:
            columns = np.minimum(first[:, None] + np.arange(num_pages), batch.page_table.shape[1] - 1)
            pages = batch.page_table[self._upload(rows)[:, None], self._upload(columns)]
        slices = pages.long()[:, None] * self.cache.num_kv_heads + self.heads[:, None]  # [b, kv_heads, m]
        return slices.flatten()

    def _bias(self, ends: Tensor, num_keys: int, window: int) -> Tensor:
        """0 where a query sees a key, -inf elsewhere: [b, 1, t * group, l], l last."""
        keys = torch.arange(num_keys, device=self.device)
        hidden = keys >= ends[..., None]  # [b, t, l]
        if window:
            hidden |= keys < ends[..., None] - window
        bias = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device).masked_fill_(hidden, -torch.inf)
        return bias.repeat_interleave(self.group_size, dim=1)[:, None]

    def _upload(self, values: Int64) -> Tensor:
        return torch.from_numpy(values).to(self.device, non_blocking=True)

    # ---- once a layer ----

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        dim = self.cache.head_dim
        keys.view(-1, dim).index_copy_(0, self.write_slots, key.reshape(-1, dim))
        values.view(-1, dim).index_copy_(0, self.write_slots, value.reshape(-1, dim))
        plan = self.plans[self.windows[layer]]
        if len(plan.whole) == 1 and plan.whole[0].tokens is None:
            return self._dense(plan, plan.whole[0], layer, query)
        output = torch.empty_like(query)
        for block in plan.whole:
            assert block.tokens is not None
            output.index_copy_(0, block.tokens, self._dense(plan, block, layer, query))
        if plan.grouped is not None:
            merged = self._merged(plan, layer, query)
            output.index_copy_(0, plan.grouped, merged)
        return output

    def _dense(self, plan: Plan, block: Block, layer: int, query: Tensor) -> Tensor:
        """A block's attention: [b * t, heads, dim]."""
        bias = self._block_bias(plan, block)
        output = F.scaled_dot_product_attention(
            self._queries(block, query), *self._gather(block, layer), attn_mask=bias, scale=self.scale
        )
        return self._tokens_first(block, output)

    def _merged(self, plan: Plan, layer: int, query: Tensor) -> Tensor:
        """Grouped rows: prefix and own part, weighted by how much of the softmax each has. [grouped, heads, dim]."""
        assert plan.grouped is not None
        shared, shared_lse = self._parts(plan, plan.prefix, layer, query)
        own, own_lse = self._parts(plan, plan.own, layer, query)
        merged = torch.lerp(shared, own, torch.sigmoid(own_lse - shared_lse))
        return merged[plan.grouped].to(query.dtype)

    def _parts(self, plan: Plan, blocks: list[Block], layer: int, query: Tensor) -> tuple[Tensor, Tensor]:
        """Blocks' outputs [tokens, heads, dim] and log-sum-exps [tokens, heads, 1], float32, set for their tokens."""
        output = torch.empty(query.shape, dtype=torch.float32, device=self.device)
        lse = torch.empty((*query.shape[:2], 1), dtype=torch.float32, device=self.device)
        for block in blocks:
            keys, values = self._gather(block, layer)
            scores = self._queries(block, query).float() @ keys.float().mT * self.scale  # [b, kv_heads, t * group, l]
            bias = self._block_bias(plan, block)
            scores = scores if bias is None else scores + bias
            block_lse = scores.logsumexp(dim=-1, keepdim=True)
            block_output = (scores - block_lse).exp() @ values.float()
            tokens = slice(None) if block.tokens is None else block.tokens
            output[tokens] = self._tokens_first(block, block_output)
            lse[tokens] = self._tokens_first(block, block_lse)
        return output, lse

    def _block_bias(self, plan: Plan, block: Block) -> Tensor | None:
        if block.bias is not None or block.ends is None:
            return block.bias
        return self._bias(block.ends, block.last, plan.window)

    def _gather(self, block: Block, layer: int) -> tuple[Tensor, Tensor]:
        """The block's keys and values: [b, kv_heads, last - first, dim] each."""
        cache = self.cache
        gathered = []
        for tensor in (cache.keys[layer], cache.values[layer]):
            flat = tensor.view(-1, cache.page_size * cache.head_dim).index_select(0, block.slices)
            pages = flat.view(block.size, cache.num_kv_heads, -1, cache.head_dim)
            gathered.append(pages[:, :, block.first : block.last])
        return gathered[0], gathered[1]

    def _queries(self, block: Block, query: Tensor) -> Tensor:
        """[tokens, heads, dim] to [b, kv_heads, t * group, dim]: heads of a group attend to the same keys."""
        query = query if block.tokens is None else query.index_select(0, block.tokens)
        split = query.reshape(block.size, -1, self.cache.num_kv_heads, self.group_size, self.cache.head_dim)
        return split.transpose(1, 2).flatten(2, 3)

    def _tokens_first(self, block: Block, x: Tensor) -> Tensor:
        """[b, kv_heads, t * group, d] to [b * t, heads, d]."""
        split = x.unflatten(2, (-1, self.group_size)).transpose(1, 2)  # [b, t, kv_heads, group, d]
        return split.reshape(-1, self.num_heads, x.shape[-1])
