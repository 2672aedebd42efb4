"""Paged attention in plain torch, for any device: the backend of CPUs, and what others are checked against.

A block gathers its pages and is one dense attention. Rows of a group with a shared prefix (Hydragen, arXiv:2402.05099)
are computed in two parts, prefix and own, merged by their log-sum-exp in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import torch
import torch.nn.functional as F
from torch import Tensor

from toka_async.attention.base import AttentionBatch, QueryKeyNorm
from toka_async.attention.blocks import DenseBlock, Planner, TileLimits, TilePlan
from toka_async.attention.kv_cache import E4M3, KVCache, view_numbers
from toka_async.attention.rope import rotate

GPU_SLAB_BYTES = 1 << 28
SMALLEST_GROUP = 16  # rows


class ReferenceAttention:
    """`AttentionBackend` over a `KVCache`, with a sliding window per layer (0: none)."""

    def __init__(
        self,
        cache: KVCache,
        num_heads: int,
        windows: Sequence[int],
        scale: float | None = None,
        limits: TileLimits | None = None,
        soft_cap: float = 0.0,
    ) -> None:
        """soft_cap: of scores, see `AttentionSpec`."""
        assert num_heads % cache.num_kv_heads == 0
        self.cache = cache
        self.num_heads = num_heads
        self.group_size = num_heads // cache.num_kv_heads
        self.windows = tuple(windows)
        self.scale = scale if scale is not None else cache.head_dim**-0.5
        self.soft_cap = soft_cap
        on_cpu = cache.device.type == "cpu"
        self.planner = Planner(
            cache, self.group_size, limits or (TileLimits() if on_cpu else TileLimits(slab_bytes=GPU_SLAB_BYTES))
        )
        self.plans: dict[int, TilePlan] = {}
        self.write_slots = self.planner.heads
        # Gathered into the same memory every time: the page faults of fresh memory cost more than the copy.
        self.key_scratch = self.value_scratch = torch.empty(0, dtype=cache.dtype, device=cache.device)

    def find_smallest_group(self) -> tuple[int, int]:
        """Returns the fewest rows of a group worth its merge, and the prefix tokens they must share."""
        planner = self.planner
        num_pages = planner.limits.shared_bytes // ((SMALLEST_GROUP - 1) * planner.page_bytes) + 1
        return SMALLEST_GROUP, num_pages * planner.page_size

    def plan(self, batch: AttentionBatch) -> None:
        self.write_slots = self.planner.locate_writes(batch)
        self.plans = self.planner.make_plans(batch, set(self.windows))

    def attend(
        self,
        layer: int,
        heads: Tensor,
        rotation: tuple[Tensor, Tensor],
        norm: QueryKeyNorm | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        query = append_tokens(self.cache, layer, self.num_heads, self.write_slots, heads, rotation, norm)
        return self._attend(self.plans[self.windows[layer]], layer, query, sinks)

    def _attend(self, plan: TilePlan, layer: int, query: Tensor, sinks: Tensor | None) -> Tensor:
        """Attends rotated queries over what the cache holds: [tokens, heads, dim]."""
        if len(plan.whole) == 1 and plan.whole[0].tokens is None:
            return self._attend_block(plan, plan.whole[0], layer, query, sinks)
        output = torch.empty_like(query)
        for block in plan.whole:
            assert block.tokens is not None
            output.index_copy_(0, block.tokens, self._attend_block(plan, block, layer, query, sinks))
        if plan.grouped is not None:
            output.index_copy_(0, plan.grouped, self._attend_grouped(plan, plan.grouped, layer, query, sinks))
        return output

    def _attend_block(
        self, plan: TilePlan, block: DenseBlock, layer: int, query: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """Attends a block: [b * t, heads, dim]."""
        if self.soft_cap or sinks is not None:
            output, _ = self._attend_part(plan, block, layer, query, sinks)
            return (output * self.cache.scales[layer].values).to(query.dtype)
        keys, values = self._gather(block, layer)
        bias = self._get_bias(plan, block)
        scales, queries = self.cache.scales[layer], self._select_queries(block, query)
        scale = self.scale * scales.keys
        output = F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias, scale=scale)
        output = output if scales.values == 1 else output * scales.values
        return self._order_by_token(output)

    def _attend_grouped(self, plan: TilePlan, rows: Tensor, layer: int, query: Tensor, sinks: Tensor | None) -> Tensor:
        """Attends grouped rows: prefix and own part, weighted by their shares of the softmax. [rows, heads, dim]."""
        prefix, prefix_lse = self._attend_parts(plan, plan.prefix, layer, query, None)
        own, own_lse = self._attend_parts(plan, plan.own, layer, query, sinks)
        merged = torch.lerp(prefix, own, torch.sigmoid(own_lse - prefix_lse)) * self.cache.scales[layer].values
        return merged[rows].to(query.dtype)

    def _attend_parts(
        self, plan: TilePlan, blocks: list[DenseBlock], layer: int, query: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Computes the tokens of blocks: outputs [tokens, heads, dim], log-sum-exps [tokens, heads, 1], float32."""
        output = torch.empty(query.shape, dtype=torch.float32, device=query.device)
        lse = torch.empty((*query.shape[:2], 1), dtype=torch.float32, device=query.device)
        for block in blocks:
            tokens = slice(None) if block.tokens is None else block.tokens
            output[tokens], lse[tokens] = self._attend_part(plan, block, layer, query, sinks)
        return output, lse

    def _attend_part(
        self, plan: TilePlan, block: DenseBlock, layer: int, query: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Computes a block: outputs [b * t, heads, dim], without the scale of values, and log-sum-exps, float32."""
        keys, values = self._gather(block, layer)
        scale = self.scale * self.cache.scales[layer].keys
        scores = compute_scores(self._select_queries(block, query), keys, scale, self.soft_cap)
        bias = self._get_bias(plan, block)
        scores = scores if bias is None else scores + bias  # [b, kv_heads, t * group, l]
        lse = scores.logsumexp(dim=-1, keepdim=True)
        if sinks is not None:
            each = sinks.float().view(self.cache.num_kv_heads, 1, self.group_size)
            lse = torch.logaddexp(lse, each.expand(-1, scores.shape[2] // self.group_size, -1).reshape(*lse.shape[1:]))
        output = (scores - lse).exp() @ values.float()
        return self._order_by_token(output), self._order_by_token(lse)

    def _get_bias(self, plan: TilePlan, block: DenseBlock) -> Tensor | None:
        if block.bias is not None or block.ends is None:
            return block.bias
        return self.planner.make_bias(block.ends, block.last, plan.window)

    def _gather(self, block: DenseBlock, layer: int) -> tuple[Tensor, Tensor]:
        """Gathers what is stored of the block, [b, kv_heads, last - first, dim] each, until the next gather.

        What a span does not have is in pages that others have, or had. It is masked, which does not end NaN.
        """
        num_heads, dim = self.cache.num_kv_heads, self.cache.head_dim
        width = self.cache.page_size * dim
        if self.key_scratch.numel() < len(block.slices) * width:
            self.key_scratch = self.key_scratch.new_empty(len(block.slices) * width)
            self.value_scratch = torch.empty_like(self.key_scratch)
        gathered, foreign = [], None if self.cache.is_finite else self.planner.find_foreign(block)
        for cache, scratch in (
            (self.cache.keys[layer], self.key_scratch),
            (self.cache.values[layer], self.value_scratch),
        ):
            pages = scratch[: len(block.slices) * width].view(-1, width)
            if cache.dtype == E4M3:
                pages.copy_(view_numbers(cache).view(-1, width).index_select(0, block.slices).view(E4M3))
            else:
                torch.index_select(cache.view(-1, width), 0, block.slices, out=pages)
            each = pages.view(block.size, num_heads, -1, dim)
            if foreign is not None:
                each.masked_fill_(foreign, 0)
            gathered.append(each[:, :, block.first : block.last])
        return gathered[0], gathered[1]

    def _select_queries(self, block: DenseBlock, query: Tensor) -> Tensor:
        """Turns [tokens, heads, dim] into [b, kv_heads, t * group, dim]: heads of a group share keys."""
        query = query if block.tokens is None else query.index_select(0, block.tokens)
        split = query.reshape(block.size, -1, self.cache.num_kv_heads, self.group_size, self.cache.head_dim)
        return split.transpose(1, 2).flatten(2, 3)

    def _order_by_token(self, x: Tensor) -> Tensor:
        """Turns [b, kv_heads, t * group, d] into [b * t, heads, d]."""
        size, num_kv_heads, _, dim = x.shape
        split = x.reshape(size, num_kv_heads, -1, self.group_size, dim)
        return split.transpose(1, 2).reshape(-1, self.num_heads, dim)


def compute_scores(queries: Tensor, keys: Tensor, scale: float, soft_cap: float) -> Tensor:
    """Computes what a softmax takes, in float32; soft_cap: see `AttentionSpec`."""
    scores = (queries.float() * scale) @ keys.float().mT
    return (scores / soft_cap).tanh_().mul_(soft_cap) if soft_cap else scores


def append_tokens(
    cache: KVCache,
    layer: int,
    num_heads: int,
    write_slots: Tensor,
    heads: Tensor,
    rotation: tuple[Tensor, Tensor],
    norm: QueryKeyNorm | None,
) -> Tensor:
    """Norms and rotates queries and keys, and writes keys and values; returns the queries [tokens, heads, dim].

    write_slots: int64 [tokens * kv_heads] (`Planner.locate_writes`). heads, rotation: see `AttentionBackend.attend`.
    """
    num_kv_heads, dim = (heads.shape[1] - num_heads) // 2, cache.head_dim
    query_key, value = torch.split(heads, [num_heads + num_kv_heads, num_kv_heads], dim=1)
    if norm is not None:
        wide = query_key if norm.weight.dtype == query_key.dtype else query_key.to(norm.weight.dtype)
        query_key = (F.rms_norm(wide, wide.shape[-1:], None, norm.eps) * norm.weight).to(query_key.dtype)
    query, key = torch.split(rotate(query_key, rotation), [num_heads, num_kv_heads], dim=1)
    if not num_kv_heads:
        return query
    if cache.is_finite:
        cache.is_finite = isfinite(key.sum(dtype=torch.float32) + value.sum(dtype=torch.float32))
    stored = cache.keys[layer], cache.values[layer]
    for target, new, scale in zip(stored, (key, value), cache.scales[layer], strict=True):
        numbers = _store(new, scale) if target.dtype == E4M3 else new
        view_numbers(target).view(-1, dim).index_copy_(0, write_slots, view_numbers(numbers).reshape(-1, dim))
    return query


def _store(x: Tensor, scale: float) -> Tensor:
    """Casts to E4M3 of this scale; what is beyond saturates."""
    largest = torch.finfo(E4M3).max
    return (x.float() * (1 / scale)).clamp(-largest, largest).to(E4M3)
