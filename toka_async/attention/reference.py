"""Paged attention in plain torch, for any device: what other backends are checked against, and the one for CPUs.

A block gathers its pages and is one dense attention. Rows of a group with a shared prefix (Hydragen,
arXiv:2402.05099) are computed in two parts, prefix and own, merged by their log-sum-exp in float32. Knows no weights
but those of norms that it is handed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from toka_async.attention.base import AttentionBatch, QueryKeyNorm
from toka_async.attention.blocks import DenseBlock, Planner, TileLimits, TilePlan
from toka_async.attention.kv_cache import KVCache
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
    ) -> None:
        assert num_heads % cache.num_kv_heads == 0
        self.cache = cache
        self.num_heads = num_heads
        self.group_size = num_heads // cache.num_kv_heads
        self.windows = tuple(windows)
        self.scale = scale if scale is not None else cache.head_dim**-0.5
        on_cpu = cache.keys[0].device.type == "cpu"
        self.planner = Planner(
            cache, self.group_size, limits or (TileLimits() if on_cpu else TileLimits(slab_bytes=GPU_SLAB_BYTES))
        )
        self.plans: dict[int, TilePlan] = {}
        self.write_slots = self.planner.heads
        # Gathered into the same memory every time: the page faults of fresh memory cost more than the copy.
        self.key_scratch = self.value_scratch = cache.keys[0].new_empty(0)

    def smallest_group(self) -> tuple[int, int]:
        """Rows of a group that is worth its merge, and the tokens that as few must share for it."""
        planner = self.planner
        num_pages = planner.limits.shared_bytes // ((SMALLEST_GROUP - 1) * planner.page_bytes) + 1
        return SMALLEST_GROUP, num_pages * planner.page_size

    def plan(self, batch: AttentionBatch) -> None:
        self.write_slots = self.planner.write_slots(batch)
        self.plans = self.planner.plans(batch, set(self.windows))

    def attend(
        self, layer: int, heads: Tensor, rotation: tuple[Tensor, Tensor], norm: QueryKeyNorm | None = None
    ) -> Tensor:
        num_kv_heads = self.cache.num_kv_heads
        query_key, value = torch.split(heads, [self.num_heads + num_kv_heads, num_kv_heads], dim=1)
        if norm is not None:
            query_key = F.rms_norm(query_key, query_key.shape[-1:], None, norm.eps) * norm.weight
        query, key = torch.split(rotate(query_key, rotation), [self.num_heads, num_kv_heads], dim=1)
        self._write(self.cache.keys[layer], key)
        self._write(self.cache.values[layer], value)
        return self._attend(self.plans[self.windows[layer]], layer, query)

    def _attend(self, plan: TilePlan, layer: int, query: Tensor) -> Tensor:
        """Attention of rotated queries over what the cache holds: [tokens, heads, dim]."""
        if len(plan.whole) == 1 and plan.whole[0].tokens is None:
            return self._dense(plan, plan.whole[0], layer, query)
        output = torch.empty_like(query)
        for block in plan.whole:
            assert block.tokens is not None
            output.index_copy_(0, block.tokens, self._dense(plan, block, layer, query))
        if plan.grouped is not None:
            output.index_copy_(0, plan.grouped, self._merged(plan, plan.grouped, layer, query))
        return output

    def _write(self, cache: Tensor, new: Tensor) -> None:
        dim = self.cache.head_dim
        cache.view(-1, dim).index_copy_(0, self.write_slots, new.reshape(-1, dim))

    def _dense(self, plan: TilePlan, block: DenseBlock, layer: int, query: Tensor) -> Tensor:
        """A block's attention: [b * t, heads, dim]."""
        keys, values = self._gather(block, layer)
        bias = self._bias(plan, block)
        output = F.scaled_dot_product_attention(
            self._queries(block, query), keys, values, attn_mask=bias, scale=self.scale
        )
        return self._tokens_first(output)

    def _merged(self, plan: TilePlan, rows: Tensor, layer: int, query: Tensor) -> Tensor:
        """Grouped rows: prefix and own part, weighted by how much of the softmax each has. [rows, heads, dim]."""
        prefix, prefix_lse = self._parts(plan, plan.prefix, layer, query)
        own, own_lse = self._parts(plan, plan.own, layer, query)
        merged = torch.lerp(prefix, own, torch.sigmoid(own_lse - prefix_lse))
        return merged[rows].to(query.dtype)

    def _parts(self, plan: TilePlan, blocks: list[DenseBlock], layer: int, query: Tensor) -> tuple[Tensor, Tensor]:
        """Blocks' outputs [tokens, heads, dim] and log-sum-exps [tokens, heads, 1], float32, set for their tokens."""
        output = torch.empty(query.shape, dtype=torch.float32, device=query.device)
        lse = torch.empty((*query.shape[:2], 1), dtype=torch.float32, device=query.device)
        for block in blocks:
            keys, values = self._gather(block, layer)
            scores = (self._queries(block, query).float() * self.scale) @ keys.float().mT
            bias = self._bias(plan, block)
            scores = scores if bias is None else scores + bias  # [b, kv_heads, t * group, l]
            block_lse = scores.logsumexp(dim=-1, keepdim=True)
            block_output = (scores - block_lse).exp() @ values.float()
            tokens = slice(None) if block.tokens is None else block.tokens
            output[tokens] = self._tokens_first(block_output)
            lse[tokens] = self._tokens_first(block_lse)
        return output, lse

    def _bias(self, plan: TilePlan, block: DenseBlock) -> Tensor | None:
        if block.bias is not None or block.ends is None:
            return block.bias
        return self.planner.bias(block.ends, block.last, plan.window)

    def _gather(self, block: DenseBlock, layer: int) -> tuple[Tensor, Tensor]:
        """The block's keys and values: [b, kv_heads, last - first, dim] each, until the next gather."""
        num_heads, dim = self.cache.num_kv_heads, self.cache.head_dim
        width = self.cache.page_size * dim
        if self.key_scratch.numel() < len(block.slices) * width:
            self.key_scratch = self.key_scratch.new_empty(len(block.slices) * width)
            self.value_scratch = torch.empty_like(self.key_scratch)
        gathered = []
        for cache, scratch in (
            (self.cache.keys[layer], self.key_scratch),
            (self.cache.values[layer], self.value_scratch),
        ):
            pages = scratch[: len(block.slices) * width].view(-1, width)
            torch.index_select(cache.view(-1, width), 0, block.slices, out=pages)
            gathered.append(pages.view(block.size, num_heads, -1, dim)[:, :, block.first : block.last])
        return gathered[0], gathered[1]

    def _queries(self, block: DenseBlock, query: Tensor) -> Tensor:
        """[tokens, heads, dim] to [b, kv_heads, t * group, dim]: heads of a group attend to the same keys."""
        query = query if block.tokens is None else query.index_select(0, block.tokens)
        split = query.reshape(block.size, -1, self.cache.num_kv_heads, self.group_size, self.cache.head_dim)
        return split.transpose(1, 2).flatten(2, 3)

    def _tokens_first(self, x: Tensor) -> Tensor:
        """[b, kv_heads, t * group, d] to [b * t, heads, d]."""
        size, num_kv_heads, _, dim = x.shape
        split = x.reshape(size, num_kv_heads, -1, self.group_size, dim)
        return split.transpose(1, 2).reshape(-1, self.num_heads, dim)
