"""Attention whose result for a token is the same bits, whatever else is in the step, and however prompts are cut.

One kernel attends decoding rows and chunks. It is not measured against others, and no prefix is shared.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from toka_async.arrays import Int64
from toka_async.attention.base import AttentionBatch, PrefixGroup
from toka_async.attention.build import Backend, BuiltAttention, resolve_backend
from toka_async.attention.copies import to_device
from toka_async.attention.invariant.by_token import TokenAttention
from toka_async.attention.kv_cache import KVCache


def build_invariant_attention(
    backend: Backend,
    cache: KVCache,
    num_heads: int,
    windows: Sequence[int],
    max_seqs: int,
    scale: float | None = None,
    soft_cap: float = 0.0,
) -> BuiltAttention:
    """Builds the backend over `cache`, for steps of up to max_seqs rows. windows: of each layer, 0: none.

    soft_cap: of scores, see `AttentionSpec`.

    Raises ModelError when the backend cannot attend over this cache; the message says why, and what can.
    """
    assert backend != "flashinfer", "a kernel of its own for decoding rows, split by the batch"
    if resolve_backend(backend, cache) == "reference":
        return BuiltAttention(TokenAttention(cache, num_heads, windows, scale, soft_cap), pays=no_group_pays)
    from toka_async.attention.paged import PagedAttention

    def make_decode() -> InvariantDecode:
        return InvariantDecode(cache, num_heads, max_seqs, scale, soft_cap)

    def make_chunks() -> InvariantChunks:
        return InvariantChunks(cache, num_heads, scale, soft_cap)

    paged = PagedAttention(cache, num_heads, windows, make_decode, make_chunks)
    return BuiltAttention(paged, paged, pays=no_group_pays)


def no_group_pays(num_rows: int, num_tokens: int) -> bool:  # noqa: ARG001
    """Accepts no group: a prefix that is read once is summed apart from the rows' own keys."""
    return False


class TileRunner:
    """Runs the kernel over tiles of the batch that was planned."""

    def __init__(self, cache: KVCache, num_heads: int, scale: float | None, soft_cap: float) -> None:
        from toka_async.kernels.invariant.attention import choose_query_tile

        group_size = num_heads // cache.num_kv_heads
        self.cache = cache
        self.soft_cap = soft_cap
        self.scale = scale if scale is not None else cache.head_dim**-0.5
        self.config = choose_query_tile(cache.head_dim, group_size, cache.dtype)
        self.num_queries = self.config.count_queries(group_size)
        self.planned: tuple[AttentionBatch, Tensor, int] | None = None

    def run(self, layer: int, query: Tensor, output: Tensor, sinks: Tensor | None = None) -> None:
        from toka_async.kernels.invariant.attention import attend_tiles

        assert self.planned is not None
        batch, tiles, window = self.planned
        keys, values, scales = self.cache.keys[layer], self.cache.values[layer], self.cache.scales[layer]
        attend_tiles(
            query,
            keys,
            values,
            batch.page_table,
            batch.slots,
            tiles,
            output,
            self.scale * scales.keys,
            window,
            self.config,
            scales.values,
            sinks,
            self.soft_cap,
        )


class InvariantDecode:
    """`GraphDecodePart` with a tile for each row, made on the device: a plan and its capture are alike."""

    def __init__(
        self, cache: KVCache, num_heads: int, max_seqs: int, scale: float | None = None, soft_cap: float = 0.0
    ) -> None:
        self.runner = TileRunner(cache, num_heads, scale, soft_cap)
        self.rows = torch.arange(max_seqs, dtype=torch.int32, device=cache.device)
        self.ones = torch.ones_like(self.rows)

    def plan(self, batch: AttentionBatch, groups: tuple[PrefixGroup, ...], window: int) -> None:  # noqa: ARG002
        self._plan(batch, batch.num_decode, window)

    def plan_graph(self, batch: AttentionBatch, grouped: bool, window: int) -> None:
        assert not grouped, "no prefix is shared"
        self._plan(batch, len(batch.slots), window)

    def set_groups(self, groups: tuple[PrefixGroup, ...]) -> None:
        raise AssertionError(f"no prefix is shared, got {groups}")

    def run(self, layer: int, query: Tensor, output: Tensor, sinks: Tensor | None = None) -> None:
        self.runner.run(layer, query, output, sinks)

    def _plan(self, batch: AttentionBatch, num_rows: int, window: int) -> None:
        rows = self.rows[:num_rows]
        tiles = torch.stack((rows, rows, self.ones[:num_rows], batch.contexts[:num_rows]), dim=1)
        self.runner.planned = batch, tiles, window


class InvariantChunks:
    """`PrefillKernel` that cuts chunks into tiles, the longest first."""

    def __init__(self, cache: KVCache, num_heads: int, scale: float | None = None, soft_cap: float = 0.0) -> None:
        self.runner = TileRunner(cache, num_heads, scale, soft_cap)

    def plan(self, batch: AttentionBatch, window: int) -> None:
        tiles = cut_tiles(batch, self.runner.num_queries)
        # The last to start are the shortest, so that no program runs long when the others are done.
        tiles = tiles[np.argsort(-tiles[:, 3], kind="stable")]
        self.runner.planned = batch, to_device(tiles.astype(np.int32), self.runner.cache.device), window

    def run(self, layer: int, query: Tensor, output: Tensor, sinks: Tensor | None = None) -> None:
        self.runner.run(layer, query, output, sinks)


def cut_tiles(batch: AttentionBatch, size: int) -> Int64:
    """Cuts the batch's chunks into tiles of at most `size` queries: int64 [n, 4], see `attend_tiles`."""
    lengths = batch.query_lengths[batch.num_decode :].astype(np.int64)
    before = batch.context_lengths[batch.num_decode :] - lengths
    first = np.cumsum(lengths) - lengths
    repeats = -(-lengths // size)
    chunk = np.repeat(np.arange(len(lengths)), repeats)
    offset = (np.arange(len(chunk)) - np.repeat(np.cumsum(repeats) - repeats, repeats)) * size
    counts = np.minimum(size, lengths[chunk] - offset)
    columns = (batch.num_decode + chunk, first[chunk] + offset, counts, before[chunk] + offset + 1)
    return np.stack(columns, axis=1)
