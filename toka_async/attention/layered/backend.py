"""Attention of a model whose layers differ in the shape of their heads or in their window: a backend and a cache each.

Layers without a window have the same pages, so that rows, page tables and plans know one numbering; those with a window
have another. A model whose layers are alike, and have no window, has none of this.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from toka_async.arrays import Int32
from toka_async.attention.base import (
    AttentionBackend,
    AttentionBatch,
    ChunkRows,
    GraphAttention,
    MixedAttention,
    PrefixGroup,
)
from toka_async.attention.build import BuiltAttention
from toka_async.attention.kv_cache import KVCache


class LayeredCache:
    """Caches of layers of different shapes, with common pages."""

    def __init__(self, parts: Sequence[KVCache]) -> None:
        self.parts = tuple(parts)

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    def mapped_bytes(self) -> int:
        return sum(part.mapped_bytes for part in self.parts)

    def release(self) -> None:
        """See `KVCache.release`."""
        for part in self.parts:
            part.release()

    def restore(self) -> None:
        """See `KVCache.restore`."""
        for part in self.parts:
            part.restore()

    def copy_pages(self, sources: Tensor, targets: Tensor, windows: tuple[Tensor, Tensor] | None = None) -> None:
        """See `KVCache.copy_pages`."""
        for part in self.parts:
            part.copy_pages(sources, targets, windows)


class _Places:
    """Where each layer is. layers: of each shape, the layers' numbers."""

    def __init__(self, layers: Sequence[Sequence[int]]) -> None:
        found = {layer: (shape, place) for shape, own in enumerate(layers) for place, layer in enumerate(own)}
        self.of_layers = [found[layer] for layer in range(len(found))]


class LayeredAttention:
    """`AttentionBackend` that passes each layer on to the backend of its shape."""

    def __init__(
        self, parts: Sequence[AttentionBackend], layers: Sequence[Sequence[int]], of_windows: Sequence[bool]
    ) -> None:
        """layers: of each part, the numbers of its layers. of_windows: whether they have window pages."""
        self.parts = tuple(parts)
        self.places = _Places(layers).of_layers
        self.of_windows = tuple(of_windows)

    def plan(self, batch: AttentionBatch) -> None:
        for part, own in zip(self.parts, self.choose(batch), strict=True):
            part.plan(own)

    def choose(self, batch: AttentionBatch) -> list[AttentionBatch]:
        """Returns the batch as each part is to see it."""
        return [batch.of_windows() if is_window else batch for is_window in self.of_windows]

    def attend(self, layer: int, *others: object) -> Tensor:
        """See `AttentionBackend`."""
        shape, place = self.places[layer]
        return self.parts[shape].attend(place, *others)  # type: ignore[arg-type]


class LayeredGraphAttention(LayeredAttention):
    """`GraphAttention` of parts that can be captured."""

    def __init__(
        self, parts: Sequence[GraphAttention], layers: Sequence[Sequence[int]], of_windows: Sequence[bool]
    ) -> None:
        super().__init__(parts, layers, of_windows)
        self.captured = tuple(parts)

    def plan_graph(self, batch: AttentionBatch, grouped: bool) -> None:
        for part, own in zip(self.captured, self.choose(batch), strict=True):
            part.plan_graph(own, grouped)

    def set_groups(self, groups: tuple[PrefixGroup, ...]) -> None:
        for part in self.captured:
            part.set_groups(groups)


class LayeredMixedAttention(LayeredAttention):
    """`MixedAttention` of parts that can be captured with chunks. Each has an equal share of the cells."""

    def __init__(
        self, parts: Sequence[MixedAttention], layers: Sequence[Sequence[int]], of_windows: Sequence[bool]
    ) -> None:
        super().__init__(parts, layers, of_windows)
        self.captured = tuple(parts)

    def count_chunk_cells(self, num_tokens: int, num_rows: int) -> int:
        return len(self.captured) * max(part.count_chunk_cells(num_tokens, num_rows) for part in self.captured)

    def describe_chunks(self, cells: Int32, chunks: ChunkRows) -> None:
        for part, own in zip(self.captured, np.split(cells, len(self.captured)), strict=True):
            part.describe_chunks(own, chunks)

    def plan_mixed(self, batch: AttentionBatch, grouped: bool, chunks: Tensor) -> None:
        cells = chunks.chunk(len(self.captured))
        for part, batch_of_part, own in zip(self.captured, self.choose(batch), cells, strict=True):
            part.plan_mixed(batch_of_part, grouped, own)

    def set_groups(self, groups: tuple[PrefixGroup, ...]) -> None:
        for part in self.captured:
            part.set_groups(groups)


def join_attention(
    parts: Sequence[BuiltAttention], layers: Sequence[Sequence[int]], of_windows: Sequence[bool] | None = None
) -> BuiltAttention:
    """Joins backends of different layers; it can do what all of them can.

    layers: the numbers of each's. of_windows: whether each's have window pages; None: none.
    """
    of_windows = of_windows or [False] * len(parts)
    if len(parts) == 1 and not of_windows[0]:
        return parts[0]
    graphs, mixed = [part.graphs for part in parts], [part.mixed for part in parts]
    captured = [part for part in graphs if part is not None]
    chunked = [part for part in mixed if part is not None]
    attention = LayeredGraphAttention(captured, layers, of_windows) if len(captured) == len(parts) else None
    backend = attention or LayeredAttention([part.backend for part in parts], layers, of_windows)
    smallest = (0, 0)
    if all(part.smallest_group != (0, 0) for part in parts):
        smallest = max(part.smallest_group[0] for part in parts), max(part.smallest_group[1] for part in parts)

    def pays(num_rows: int, num_tokens: int) -> bool:
        return all(part.pays(num_rows, num_tokens) for part in parts)

    return BuiltAttention(
        backend,
        attention,
        smallest,
        pays,
        mixed=LayeredMixedAttention(chunked, layers, of_windows) if len(chunked) == len(parts) else None,
    )
