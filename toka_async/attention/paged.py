"""Attention in two exchangeable parts, for decoding rows and for chunks of prompts, behind one append.

One kernel here does what both need in every layer: norms, rotation, the write to the cache. For CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from toka_async.arrays import Int32, Int64
from toka_async.attention.base import AttentionBatch, PrefixGroup, QueryKeyNorm
from toka_async.attention.kv_cache import KVCache
from toka_async.kernels.append import append


class DecodeKernel(Protocol):
    """Attends a step's decoding rows over the cache that the part was built on. Holds one plan at a time."""

    def plan(self, batch: AttentionBatch, groups: tuple[PrefixGroup, ...], window: int) -> None:
        """Prepares for the batch's decoding rows. A query sees the last `window` keys, 0: all of them.

        `groups`: shared prefixes to attend once for all of their rows; they may reach out of the window.
        """
        ...

    def run(self, layer: int, query: Tensor, output: Tensor, sinks: Tensor | None = None) -> None:
        """Attends from query, rotated, into output: [num_decode, heads, dim] each, contiguous.

        sinks: see `AttentionBackend.attend`.
        """
        ...


class GraphDecodePart(DecodeKernel, Protocol):
    """A decode part whose runs can be captured in CUDA graphs and replayed for other rows."""

    def plan_graph(self, batch: AttentionBatch, grouped: bool, window: int) -> None:
        """Prepares for a capture: the batch's device tensors are refilled in place before each replay.

        All rows decode; lengths on the host mean nothing. `grouped`: replays follow `set_groups`. Plan most rows first.
        """
        ...

    def set_groups(self, groups: tuple[PrefixGroup, ...]) -> None:
        """Sets the groups of the next replays of grouped graphs."""
        ...


class PrefillKernel(Protocol):
    """Attends a step's chunks of prompts, causally, over its cache. Holds one plan at a time."""

    def plan(self, batch: AttentionBatch, window: int) -> None:
        """Prepares for the batch's chunks. A query sees the last `window` keys, 0: all of them."""
        ...

    def run(self, layer: int, query: Tensor, output: Tensor, sinks: Tensor | None = None) -> None:
        """Attends from query, rotated, into output: [tokens of chunks, heads, dim] each, contiguous.

        sinks: see `AttentionBackend.attend`.
        """
        ...


class GraphPrefillPart(PrefillKernel, Protocol):
    """A part for chunks whose runs can be captured in CUDA graphs and replayed for other chunks."""

    def count_cells(self, num_tokens: int, num_rows: int) -> int:
        """Counts the numbers in which `describe` describes any chunks of so many tokens of so many rows."""
        ...

    def describe(self, cells: Int32, num_decode: int, lengths: Int32, contexts: Int64, window: int) -> None:
        """Writes into cells, all zeros, what chunks of these lengths and contexts follow the decoding rows."""
        ...

    def plan_graph(self, batch: AttentionBatch, window: int, cells: Tensor) -> None:
        """Prepares for a capture: the batch's device tensors and `cells`, int32, are refilled before each replay.

        Runs get queries and outputs of all tokens, those of decoding rows first.
        """
        ...


class PagedAttention:
    """`AttentionBackend` over a `KVCache`, with a sliding window per layer (0: none).

    Each distinct window has parts of its own, which hold its plan. Windows that no row outgrows share one plan.
    """

    def __init__(
        self,
        cache: KVCache,
        num_heads: int,
        windows: Sequence[int],
        decode: Callable[[], GraphDecodePart],
        chunks: Callable[[], PrefillKernel],
    ) -> None:
        assert num_heads % cache.num_kv_heads == 0
        self.cache = cache
        self.num_heads = num_heads
        self.windows = tuple(windows)
        self.decodes = {window: decode() for window in sorted({0, *windows})}
        self.chunks = {window: chunks() for window in sorted({0, *windows})}
        self.effective = {window: window for window in windows}
        self.num_decode = 0
        self.write_indices = torch.empty(0, dtype=torch.int64)

    def plan(self, batch: AttentionBatch) -> None:
        longest = int(batch.context_lengths.max(initial=0))
        self.effective = {window: window if window < longest else 0 for window in self.windows}
        self.num_decode, self.write_indices = batch.num_decode, batch.write_indices
        for window in set(self.effective.values()):
            if batch.num_decode:
                self.decodes[window].plan(batch, batch.groups, window)
            if len(batch.query_lengths) > batch.num_decode:
                self.chunks[window].plan(batch, window)

    def plan_graph(self, batch: AttentionBatch, grouped: bool) -> None:
        self.effective = {window: window for window in self.windows}
        self.num_decode, self.write_indices = len(batch.slots), batch.write_indices
        for window in set(self.windows):
            self.decodes[window].plan_graph(batch, grouped, window)

    def set_groups(self, groups: tuple[PrefixGroup, ...]) -> None:
        for window in set(self.windows):
            self.decodes[window].set_groups(groups)

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
        output = torch.empty_like(query)
        window, split = self.effective[self.windows[layer]], self.num_decode
        if split:
            self.decodes[window].run(layer, query[:split], output[:split], sinks)
        if split < len(query):
            self.chunks[window].run(layer, query[split:], output[split:], sinks)
        return output
