"""Random steps over a paged cache, for tests of attention on any device, and attention by its definition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tests.drivers.paged_rows import make_batch
from toka_async.attention.base import AttentionBatch, PrefixGroup
from toka_async.attention.kv_cache import CacheFormat, KVCache, LayerScales


@dataclass(slots=True)
class AttentionCase:
    """A step and the cache that it reads; query [tokens, heads, dim]."""

    cache: KVCache
    batch: AttentionBatch
    num_heads: int
    query: Tensor
    sinks: Tensor | None = None

    @property
    def scale(self) -> float:
        return float(self.cache.head_dim**-0.5)

    def expected(self, window: int = 0) -> Tensor:
        """Softmax attention in float32, row by row, of the queries as they are over the cache as it is."""
        cache, batch = self.cache, self.batch
        group_size = self.num_heads // cache.num_kv_heads
        outputs: list[Tensor] = []
        start = 0
        for row, (count, context) in enumerate(
            zip(batch.query_lengths.tolist(), batch.context_lengths.tolist(), strict=True)
        ):
            pages = batch.page_table[batch.slots[row], : -(-context // cache.page_size)].long()
            keys, values = (
                scale * stored.float()[pages].transpose(1, 2).flatten(0, 1)[:context].repeat_interleave(group_size, 1)
                for stored, scale in zip((cache.keys[0], cache.values[0]), cache.scales[0], strict=True)
            )
            query = self.query[start : start + count].float()
            position = torch.arange(context - count, context, device=query.device)[:, None]
            key = torch.arange(context, device=query.device)
            hidden = key > position
            if window:
                hidden |= key <= position - window
            scores = torch.einsum("qhd,lhd->hql", query, keys) * self.scale
            scores = scores.masked_fill(hidden, -torch.inf)
            if self.sinks is not None:
                scores = torch.cat([scores, self.sinks.float().view(-1, 1, 1).expand(-1, count, 1)], -1)
            weights = scores.softmax(-1)[..., :context]
            outputs.append(torch.einsum("hql,lhd->qhd", weights, values))
            start += count
        return torch.cat(outputs)


def make_case(
    seed: int,
    page_size: int,
    kv_heads: int,
    group_size: int,
    dim: int,
    groups: Sequence[tuple[int, int]] = (),
    contexts: Sequence[int] = (),
    chunks: Sequence[tuple[int, int]] = (),
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    stored: CacheFormat | None = None,
    has_sinks: bool = False,
) -> AttentionCase:
    """groups: (rows, pages of their prefix), each followed by a row of `contexts`, while there are any.

    chunks: (tokens before, tokens). Pages lie in random order.
    """
    rng = np.random.default_rng(seed)
    rows: list[tuple[int, int, int]] = []  # group or -1, context, queries
    prefixes: list[PrefixGroup] = []
    singles = list(contexts)
    for number, (num_rows, num_pages) in enumerate(groups):
        prefixes.append(PrefixGroup(len(rows), num_rows, num_pages))
        rows += [(number, num_pages * page_size + int(rng.integers(1, 3 * page_size + 40)), 1) for _ in range(num_rows)]
        rows += [(-1, context, 1) for context in singles[:1]]
        singles = singles[1:]
    rows += [(-1, context, 1) for context in singles]
    num_decode = len(rows)
    rows += [(-1, before + count, count) for before, count in chunks]
    needed = sum(-(-context // page_size) for _, context, _ in rows)
    free = iter(rng.permutation(needed + sum(pages for _, pages in groups)).tolist())
    shared = [[next(free) for _ in range(pages)] for _, pages in groups]
    placed = []
    for number, context, count in rows:
        pages = list(shared[number]) if number >= 0 else []
        pages += [next(free) for _ in range(-(-context // page_size) - len(pages))]
        placed.append((pages, context, count))
    num_pages = needed + sum(pages for _, pages in groups)
    cache = KVCache(1, num_pages, kv_heads, page_size, dim, dtype, device or CPU, stored=stored)
    generator = torch.Generator(device=device or CPU).manual_seed(seed)
    for tensor in (cache.keys[0], cache.values[0]):
        tensor.copy_(torch.empty_like(tensor, dtype=torch.float32).normal_(generator=generator))
    num_tokens = sum(count for _, _, count in rows)
    shape = (num_tokens, kv_heads * group_size, dim)
    query = 2 * torch.randn(shape, generator=generator, device=device or CPU)
    batch = make_batch(placed, num_decode, page_size, tuple(prefixes), device)
    sinks = None
    if has_sinks:
        sinks = (4 * torch.randn(kv_heads * group_size, generator=generator, device=device or CPU)).to(dtype)
    return AttentionCase(cache, batch, kv_heads * group_size, query.to(dtype), sinks)


CPU = torch.device("cpu")
E4M3_SCALED = CacheFormat(torch.float8_e4m3fn, (LayerScales(0.375, 5.0),))
