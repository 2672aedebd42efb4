"""Paged attention in plain torch, one token at a time: the same bits for a token, whatever is computed with it.

The shapes of a token's attention depend on its position alone, and so does the order in which it is summed. The price
is a call for each token of a step in every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from toka_async.attention.base import AttentionBatch, QueryKeyNorm
from toka_async.attention.blocks import Planner, TileLimits
from toka_async.attention.kv_cache import KVCache, view_numbers
from toka_async.attention.reference import append_tokens, compute_scores


@dataclass(slots=True, frozen=True)
class _TokenKeys:
    """The keys that a token sees: first to last of those in `slices`, int64 [kv_heads * pages] (see `DenseBlock`)."""

    slices: Tensor
    first: int
    last: int


class TokenAttention:
    """`AttentionBackend` over a `KVCache`, with a sliding window per layer (0: none). Groups are not shared."""

    def __init__(
        self,
        cache: KVCache,
        num_heads: int,
        windows: Sequence[int],
        scale: float | None = None,
        soft_cap: float = 0.0,
    ) -> None:
        assert num_heads % cache.num_kv_heads == 0
        self.cache = cache
        self.num_heads = num_heads
        self.windows = tuple(windows)
        self.scale = scale if scale is not None else cache.head_dim**-0.5
        self.soft_cap = soft_cap
        self.planner = Planner(cache, num_heads // cache.num_kv_heads, TileLimits())
        self.write_slots = self.planner.heads
        self.plans: dict[int, list[_TokenKeys]] = {}

    def plan(self, batch: AttentionBatch) -> None:
        self.write_slots = self.planner.locate_writes(batch)
        self.plans = {window: self._locate_keys(batch, window) for window in set(self.windows)}

    def attend(
        self,
        layer: int,
        heads: Tensor,
        rotation: tuple[Tensor, Tensor],
        norm: QueryKeyNorm | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        query = append_tokens(self.cache, layer, self.num_heads, self.write_slots, heads, rotation, norm)
        output, scales = torch.empty_like(query), self.cache.scales[layer]
        for token, seen in enumerate(self.plans[self.windows[layer]]):
            keys, values = self._gather(self.cache.keys[layer], seen), self._gather(self.cache.values[layer], seen)
            own = query[token].clone().view(1, self.cache.num_kv_heads, -1, self.cache.head_dim)
            scale = self.scale * scales.keys
            if self.soft_cap or sinks is not None:
                scores = compute_scores(own, keys, scale, self.soft_cap)  # [1, kv_heads, group, keys]
                if sinks is not None:
                    scores = torch.cat((scores, sinks.float().view(*scores.shape[:3], 1)), -1)
                mixed = scores.softmax(dim=-1)[..., : keys.shape[2]].to(values.dtype) @ values
            else:
                mixed = F.scaled_dot_product_attention(own, keys, values, scale=scale)
            output[token] = mixed.view_as(output[token]) * scales.values
        return output

    def _locate_keys(self, batch: AttentionBatch, window: int) -> list[_TokenKeys]:
        size, kv_heads = self.cache.page_size, self.cache.num_kv_heads
        found = []
        rows = zip(batch.slots.tolist(), batch.context_lengths.tolist(), batch.query_lengths.tolist(), strict=True)
        for slot, context, count in rows:
            pages = batch.page_table[slot, : -(-context // size)].long()
            slices = pages * kv_heads + self.planner.heads[:, None]  # [kv_heads, pages]
            for end in range(context - count + 1, context + 1):
                first = max(0, end - window) if window else 0
                begin = first // size
                own = slices[:, begin : -(-end // size)].flatten()
                found.append(_TokenKeys(own, first - begin * size, end - begin * size))
        return found

    def _gather(self, cache: Tensor, seen: _TokenKeys) -> Tensor:
        """Gathers what is stored of keys or values [1, kv_heads, last - first, dim]."""
        num_heads, dim = self.cache.num_kv_heads, self.cache.head_dim
        numbers = view_numbers(cache).view(-1, self.cache.page_size * dim).index_select(0, seen.slices)
        pages = numbers.view(cache.dtype).to(self.cache.dtype)
        return pages.view(1, num_heads, -1, dim)[:, :, seen.first : seen.last]
