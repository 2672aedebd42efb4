"""Attention of decoding rows and chunks of prompts together, captured in CUDA graphs and replayed for other steps.

A graph's tensors have room for a number of tokens and rows. What a step has of them lies on the device: decoding rows
are the first ones, with their contexts; of further rows these are 0. Chunks are described in cells. Programs without
work end at once. For CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from toka_async.arrays import Int32
from toka_async.attention.base import AttentionBatch, ChunkRows, PrefixGroup, QueryKeyNorm
from toka_async.attention.kv_cache import KVCache
from toka_async.attention.paged import GraphDecodePart, GraphPrefillPart
from toka_async.kernels.append import append


class MixedGraphAttention:
    """`MixedAttention` over a `KVCache`, with a sliding window per layer (0: none)."""

    def __init__(
        self,
        cache: KVCache,
        num_heads: int,
        windows: Sequence[int],
        decode: Callable[[], GraphDecodePart],
        chunks: Callable[[], GraphPrefillPart],
    ) -> None:
        self.cache = cache
        self.num_heads = num_heads
        self.windows = tuple(windows)
        self.decodes = {window: decode() for window in sorted({*windows})}
        self.chunks = {window: chunks() for window in sorted({*windows})}
        self.num_rows = 0
        self.write_indices = torch.empty(0, dtype=torch.int64)

    def count_chunk_cells(self, num_tokens: int, num_rows: int) -> int:
        return sum(chunks.count_cells(num_tokens, num_rows) for chunks in self.chunks.values())

    def describe_chunks(self, cells: Int32, chunks: ChunkRows) -> None:
        parts = np.split(cells, len(self.chunks))
        for part, (window, prefill) in zip(parts, self.chunks.items(), strict=True):
            prefill.describe(part, chunks.num_decode, chunks.lengths, chunks.contexts, window)

    def plan_mixed(self, batch: AttentionBatch, grouped: bool, chunks: Tensor) -> None:
        self.num_rows, self.write_indices = batch.num_decode, batch.write_indices
        for cells, (window, part) in zip(chunks.chunk(len(self.chunks)), self.chunks.items(), strict=True):
            part.plan_graph(batch, window, cells)
            self.decodes[window].plan_graph(batch, grouped, window)

    def set_groups(self, groups: tuple[PrefixGroup, ...]) -> None:
        for decode in self.decodes.values():
            decode.set_groups(groups)

    def plan(self, batch: AttentionBatch) -> None:
        raise AssertionError(f"only graphs are planned, not {batch}")

    def attend(
        self,
        layer: int,
        heads: Tensor,
        rotation: tuple[Tensor, Tensor],
        norm: QueryKeyNorm | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        weight, eps = (norm.weight, norm.eps) if norm is not None else (None, 0.0)
        writes, scales = heads.shape[1] > self.num_heads, self.cache.scales[layer]
        query = append(heads, rotation, keys, values, self.write_indices, weight, eps, scales, writes)
        output = torch.empty_like(query)  # of padding it stays as it is
        window, rows = self.windows[layer], slice(self.num_rows)
        self.chunks[window].run(layer, query, output, sinks)
        self.decodes[window].run(layer, query[rows], output[rows], sinks)
        return output
