"""Attention parts over our own Triton kernels.

Decoding rows need no plan on the host; groups and chunks become lists of tiles. Rows of a group attend their prefix in
tiles that read it once for many rows, then continue with their own keys from that result (Hydragen, arXiv:2402.05099).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from toka_async.arrays import Int32, Int64
from toka_async.attention.base import AttentionBatch, PrefixGroup
from toka_async.attention.copies import pin, to_device
from toka_async.attention.kv_cache import KVCache
from toka_async.attention.prefix_memory import PrefixMemory, count_partials
from toka_async.attention.row_decode import RowDecode
from toka_async.attention.tile_parts import keep_tiles, split_tiles
from toka_async.attention.wide.pages import Pages, WidePages
from toka_async.kernels.decode import Partial, merge
from toka_async.kernels.occupancy import count_resident
from toka_async.kernels.prefill import PrefillConfig, attend_chunks, attend_prefixes, list_prefill_configs

PREFIX_PROGRAMS_PER_SM = 2
MOST_PREFIX_SPLITS = 8
MERGED_QUERIES = 256  # of a captured step, in tiles of several parts
SPARE_TILES = 32  # programs of a captured step beside those for full tiles: each chunk may have one that is not full
KEPT_GROUPS = 64  # descriptions of groups that are kept: a step's parts have the same groups in the next step


@dataclass(slots=True, frozen=True)
class _Shared:
    """What grouped rows read together. skip: int32 [rows]; tiles: see `attend_prefixes`; splits: of a prefix's keys.

    wide_tiles: over the wide pages of `sources`, see `WidePages.fill`. num_programs, num_wide: of both; 0: no launch.
    """

    skip: Tensor
    wide_tiles: Tensor
    sources: Tensor
    tiles: Tensor
    num_programs: int
    num_wide: int
    splits: int


class TritonDecode:
    """`GraphDecodePart` of one kernel for all rows, after another one if rows share prefixes."""

    def __init__(
        self,
        cache: KVCache,
        num_heads: int,
        scale: float | None = None,
        tiles: PrefillConfig | None = None,
        memory: PrefixMemory | None = None,
        soft_cap: float = 0.0,
        wide: WidePages | None = None,
    ) -> None:
        """tiles: of prefixes that rows share; None: the best, if they fit the chip.

        memory: parts of one stream may share it; None: it has its own. soft_cap: of scores, see `AttentionSpec`. wide:
        shared as `memory` is; None: no prefix is widened.
        """
        self.cache = cache
        self.soft_cap = soft_cap
        self.scale = scale if scale is not None else cache.head_dim**-0.5
        self.num_heads = num_heads
        self.device = cache.device
        self.num_sms = count_sms(self.device)
        group_size = num_heads // cache.num_kv_heads
        self.tile_config = tiles or list_prefill_configs(cache.head_dim, group_size, cache.dtype)[0]
        self.tile_rows = self.tile_config.queries(group_size)
        self.memory = memory or PrefixMemory(self.device, count_partials(self.device), cache.dtype)
        self.wide = wide
        self.rows = RowDecode(cache, num_heads, self.scale, soft_cap)
        self.shared: _Shared | None = None
        # Grouped graphs: the groups that graph_data describes, as `_divide` says.
        self.graph_groups: tuple[PrefixGroup, ...] = ()
        self.graph_rows = 0
        self.graph_data = torch.empty(0, dtype=torch.int32, device=self.device)
        self.graph_kept: dict[tuple[PrefixGroup, ...], Tensor] = {}  # pinned, the newest last

    def plan(self, batch: AttentionBatch, groups: tuple[PrefixGroup, ...], window: int) -> None:
        contexts = batch.context_lengths[: batch.num_decode]
        spans = _drop_unseen(_read_groups(groups), contexts, self.cache.page_size, window)
        self.shared, lengths = None, np.minimum(contexts, window) if window else contexts
        if len(spans):
            data, skip, num_tiles, num_wide = self._describe(spans, batch.num_decode)
            lengths = np.minimum(contexts - skip, lengths)
            splits = self._count_prefix_splits(num_tiles + num_wide, batch.num_decode)
            parts = self._view_parts(to_device(data, self.device), batch.num_decode)
            self.shared = _Shared(*parts, num_tiles, num_wide, splits)
        self.rows.plan(batch, lengths, None if self.shared is None else self.shared.skip, window)

    def plan_graph(self, batch: AttentionBatch, grouped: bool, window: int) -> None:
        num_rows = len(batch.slots)
        self.shared = None
        if grouped:
            if not self.graph_rows:
                self.graph_rows = _round_up(num_rows)
                # Each group may have one partly full tile, so there are at most as many tiles as rows.
                size = self._divide(self.graph_rows)[-1].start + 4 * (self.graph_rows + 1)
                self.graph_data = torch.zeros(size, dtype=torch.int32, device=self.device)
            assert num_rows <= self.graph_rows, "the first grouped plan is of the most rows"
            full_tiles = -(-num_rows // self.tile_rows)
            num_programs = full_tiles + -(-num_rows // 64)  # full tiles, and some of small groups
            num_wide = 0 if self.wide is None else self.wide.count_tiles(num_rows)
            splits = self._count_prefix_splits(full_tiles, num_rows)
            parts = self._view_parts(self.graph_data, self.graph_rows)
            self.shared = _Shared(*parts, num_programs, num_wide, splits)
        self.rows.plan_graph(batch, None if self.shared is None else self.shared.skip, window)

    def set_groups(self, groups: tuple[PrefixGroup, ...]) -> None:
        assert self.graph_rows, "no grouped graph was planned"
        if groups == self.graph_groups:
            return
        data = self.graph_kept.pop(groups, None)
        if data is None:
            spans = _read_groups(groups)
            spans[:, 2] *= self.cache.page_size
            data = pin(self._describe(spans, self.graph_rows)[0], self.device)
            if len(self.graph_kept) == KEPT_GROUPS:
                del self.graph_kept[next(iter(self.graph_kept))]
        self.graph_kept[groups] = data
        # In the stream's order: a replay under way is done with the old groups before the copy.
        self.graph_data[: len(data)].copy_(data, non_blocking=True)
        self.graph_groups = groups

    def run(self, layer: int, query: Tensor, output: Tensor, sinks: Tensor | None = None) -> None:
        shared, step = self.shared, self.rows.step
        assert step is not None
        prefix = None
        if shared is not None:
            # One partial result may lie where the rows' outputs go: each program reads its own before it writes.
            prefix = self.memory.take(query, shared.splits, output)
            scale, table, slots = self.scale * self.cache.scales[layer].keys, step.batch.page_table, step.batch.slots
            if shared.num_programs:
                pages: Pages = self.cache.keys[layer], self.cache.values[layer], table, slots
                tiles = shared.tiles, shared.num_programs
                attend_prefixes(query, *pages, *tiles, prefix, scale, self.tile_config, self.soft_cap)
            if shared.num_wide:
                assert self.wide is not None
                pages = self.wide.fill(layer, table, slots, shared.sources)
                tiles = shared.wide_tiles, shared.num_wide
                attend_prefixes(query, *pages, *tiles, prefix, scale, self.wide.config, self.soft_cap)
        self.rows.run(layer, query, output, prefix, sinks)

    def run_prefix_kernel(self) -> None:
        """Runs the kernel of shared prefixes without any, so that it is compiled."""
        keys, zero = self.cache.keys[0], torch.zeros((1, 4), dtype=torch.int32, device=self.device)
        query = self.cache.make_zero_queries(1, self.num_heads)
        result = self.memory.take(query, 1, query)
        config = self.tile_config
        attend_prefixes(query, keys, keys, zero, zero[0].long(), zero, 1, result, 1.0, config, self.soft_cap)

    def _describe(self, spans: Int64, num_rows: int) -> tuple[Int32, Int64, int, int]:
        """Turns spans [n, 3] of (first row, rows, keys) into device data, which `_divide` divides.

        Also returns skips [num_rows], and the number of tiles, over the cache and over wide pages.
        """
        first, count, keys = spans.T
        skip = np.zeros(_round_up(num_rows), dtype=np.int64)
        skip[_make_ranges(first, count)] = np.repeat(keys, count)
        wide_tiles, sources = np.zeros((1, 4), dtype=np.int64), np.zeros((0, 2), dtype=np.int64)
        if self.wide is not None:
            pages = keys // self.cache.page_size
            is_wide = self.wide.choose_groups(count, pages)
            if is_wide.any():
                rows, sources = self.wide.place(first[is_wide], pages[is_wide])
                chosen = first[is_wide], count[is_wide], keys[is_wide]
                wide_tiles = _cut_tiles(rows, *chosen, self.wide.tile_queries, causal=False)
                first, count, keys = first[~is_wide], count[~is_wide], keys[~is_wide]
        tiles = _cut_tiles(first, first, count, keys, self.tile_rows, causal=False)
        places = self._divide(num_rows)
        data = np.zeros(places[-1].start + tiles.size, dtype=np.int32)
        for place, table in zip(places, (skip, wide_tiles, sources, tiles), strict=True):
            data[place][: table.size] = table.ravel()
        return data, skip[:num_rows], len(tiles) - 1, len(wide_tiles) - 1

    def _divide(self, num_rows: int) -> tuple[slice, slice, slice, slice]:
        """Divides data of so many rows into skips, padded, tiles over wide pages, their sources, and other tiles.

        What is without a fixed size is last, so that graphs find all else where it was.
        """
        most_tiles = 0 if self.wide is None else self.wide.count_tiles(num_rows)
        most_pages = 0 if self.wide is None or not most_tiles else self.wide.most
        middle = _round_up(num_rows) + 4 * (most_tiles + 1)
        last = middle + _round_up(2 * (most_pages + 1))
        return slice(_round_up(num_rows)), slice(_round_up(num_rows), middle), slice(middle, last), slice(last, None)

    def _view_parts(self, data: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        skip, wide_tiles, sources, tiles = (data[place] for place in self._divide(num_rows))
        return skip, wide_tiles.view(-1, 4), sources.view(-1, 2), tiles.view(-1, 4)

    def _count_prefix_splits(self, num_tiles: int, num_rows: int) -> int:
        wanted = PREFIX_PROGRAMS_PER_SM * self.num_sms // (num_tiles * self.cache.num_kv_heads)
        most = self.memory.most // (num_rows * self.num_heads * self.cache.head_dim)
        return max(min(wanted, most, MOST_PREFIX_SPLITS), 1)


@dataclass(slots=True, frozen=True)
class _ChunkPlan:
    """tiles, parts, partial: see `attend_chunks`. merged: see `merge`; no rows if no tile has several parts.

    sources: of wide pages, which the tiles then read (`WidePages.fill`); None: they read the cache.
    """

    batch: AttentionBatch
    window: int
    tiles: Tensor
    num_programs: int
    parts: Tensor
    merged: Tensor
    partial: Partial
    sources: Tensor | None = None


class TritonChunks:
    """`ChunkPart` that cuts chunks into tiles, the longest first."""

    def __init__(
        self,
        cache: KVCache,
        num_heads: int,
        scale: float | None = None,
        tiles: PrefillConfig | None = None,
        soft_cap: float = 0.0,
        wide: WidePages | None = None,
    ) -> None:
        """tiles: of chunks; None: the best, if they fit the chip. soft_cap: of scores, see `AttentionSpec`.

        wide: parts of one stream may share it; None: nothing is widened. Chunks in graphs read the cache.
        """
        self.cache = cache
        self.soft_cap = soft_cap
        self.scale = scale if scale is not None else cache.head_dim**-0.5
        self.num_heads = num_heads
        self.device = cache.device
        group_size = num_heads // cache.num_kv_heads
        self.config = tiles or list_prefill_configs(cache.head_dim, group_size, cache.dtype)[0]
        self.tile_queries = self.config.queries(group_size)
        self.wide = wide
        self.programs = max(1, self._count_programs() // cache.num_kv_heads)  # of each KV head that run at once
        self.step: _ChunkPlan | None = None

    def plan(self, batch: AttentionBatch, window: int) -> None:
        lengths, contexts = batch.query_lengths[batch.num_decode :], batch.context_lengths[batch.num_decode :]
        rows = np.arange(batch.num_decode, len(batch.query_lengths))
        size, block_keys, sources = self.tile_queries, self.config.block_keys, np.empty((0, 2), dtype=np.int64)
        if self.wide is not None and not window and self.wide.is_worth(lengths, contexts):
            size, block_keys = self.wide.tile_queries, self.wide.config.block_keys
            rows, sources = self.wide.place(rows, -(-contexts // self.cache.page_size))
        tiles = _cut_chunks(rows, 0, lengths, contexts, size)
        split = split_tiles(tiles, window, size, block_keys, self.programs) or keep_tiles(tiles, window, block_keys)
        tables = split.tiles, split.parts, split.merged, sources
        sizes = np.cumsum([table.size for table in tables[:-1]])
        data = to_device(np.concatenate(tables, axis=None, dtype=np.int32), self.device)
        there, parts, merged, listed = data.tensor_split(sizes.tolist())
        self.step = _ChunkPlan(
            batch,
            window,
            there.view(-1, 4),
            len(split.parts),
            parts.view(-1, 3),
            merged.view(-1, 3),
            self._make_partial(split.num_partials * size),
            listed.view(-1, 2) if len(sources) else None,
        )

    def count_cells(self, num_tokens: int, num_rows: int) -> int:
        most = num_tokens // self.tile_queries + num_rows + self.programs  # tiles, and parts beside their first
        return 4 + 7 * most + 3 * MERGED_QUERIES

    def describe(self, cells: Int32, num_decode: int, lengths: Int32, contexts: Int64, window: int) -> None:
        rows = np.arange(num_decode, num_decode + len(lengths))
        tiles = _cut_chunks(rows, num_decode, lengths, contexts, self.tile_queries)
        split = split_tiles(tiles, window, self.tile_queries, self.config.block_keys, self.programs)
        if split is None or len(split.merged) > MERGED_QUERIES:
            split = keep_tiles(tiles, window, self.config.block_keys)
        for place, table in zip(_divide_cells(len(cells)), (split.tiles, split.parts, split.merged), strict=True):
            cells[place][: table.size] = table.ravel()

    def plan_graph(self, batch: AttentionBatch, window: int, cells: Tensor) -> None:
        tiles, parts, merged = (cells[place] for place in _divide_cells(len(cells)))
        num_programs = -(-len(batch.write_indices) // self.tile_queries) + max(self.programs, SPARE_TILES)
        self.step = _ChunkPlan(
            batch,
            window,
            tiles.view(-1, 4),
            min(num_programs, len(parts) // 3),
            parts.view(-1, 3),
            merged.view(-1, 3),
            # a tile in parts has no more than twice as many as it has besides one
            self._make_partial(2 * self.programs * self.tile_queries),
        )

    def run(self, layer: int, query: Tensor, output: Tensor, sinks: Tensor | None = None) -> None:
        step = self.step
        assert step is not None
        scales, batch, config = self.cache.scales[layer], step.batch, self.config
        pages: Pages = self.cache.keys[layer], self.cache.values[layer], batch.page_table, batch.slots
        if step.sources is not None:
            assert self.wide is not None
            pages, config = self.wide.fill(layer, batch.page_table, batch.slots, step.sources), self.wide.config
        attend_chunks(
            query,
            *pages,
            step.tiles,
            step.num_programs,
            output,
            self.scale * scales.keys,
            step.window,
            config,
            step.parts,
            step.partial,
            scales.values,
            sinks,
            self.soft_cap,
        )
        if len(step.merged):
            merge(step.partial, step.merged, config.queries(self.num_heads // self.cache.num_kv_heads), output)

    def _make_partial(self, num_queries: int) -> Partial:
        shape = (num_queries, self.num_heads, self.cache.head_dim)
        return Partial(
            torch.empty(shape, dtype=torch.float32, device=self.device),
            torch.empty(shape[:2], dtype=torch.float32, device=self.device),
        )

    def _count_programs(self) -> int:
        """Counts the programs that run at once, by one run without tiles; 1 if there is no GPU."""
        if self.device.type != "cuda":
            return 1
        keys, zero = self.cache.keys[0], torch.zeros((1, 4), dtype=torch.int32, device=self.device)
        query, none = self.cache.make_zero_queries(1, self.num_heads), self._make_partial(0)
        rows, parts = (zero, zero[0].long(), zero, 1, query), (zero[:, :3], none)
        kernel = attend_chunks(query, keys, keys, *rows, 1.0, 0, self.config, *parts, soft_cap=self.soft_cap)
        return count_resident(kernel, self.device)


def _cut_chunks(rows: Int64, first_query: int, lengths: Int32, contexts: Int32 | Int64, size: int) -> Int64:
    """Cuts chunks of rows into tiles of at most `size` queries, as `attend_chunks` takes them."""
    counts = lengths.astype(np.int64)
    firsts, seen = first_query + np.cumsum(counts) - counts, contexts - counts + 1
    return _cut_tiles(rows, firsts, counts, seen, size, causal=True)


def _divide_cells(num_cells: int) -> tuple[slice, slice, slice]:
    """Divides what a graph reads of chunks into tiles and their parts, equally many, and merged queries."""
    last = num_cells - 3 * MERGED_QUERIES
    middle = 4 + (last - 4) // 7 * 4
    return slice(middle), slice(middle, last), slice(last, None)


def count_sms(device: torch.device) -> int:
    """Counts the multiprocessors of the device; 1 if it has none."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _round_up(num_rows: int) -> int:
    """Rounds up to 16 bytes of int32: what follows in memory is aligned, and kernels see one alignment only."""
    return -(-num_rows // 4) * 4


def _read_groups(groups: Sequence[PrefixGroup]) -> Int64:
    """Reads groups as int64 [n, 3]: first row, rows, pages."""
    return np.array([(g.first_row, g.num_rows, g.num_pages) for g in groups], dtype=np.int64).reshape(-1, 3)


def _drop_unseen(spans: Int64, contexts: Int32, page_size: int, window: int) -> Int64:
    """Turns the groups' pages into keys, and drops groups that are not entirely in every row's window."""
    spans = spans * np.array([1, 1, page_size])
    if not len(spans):
        return spans
    edges = np.stack((spans[:, 0], spans[:, 0] + spans[:, 1]), axis=1).ravel()
    shortest = np.minimum.reduceat(np.append(contexts, contexts[-1]), edges)[::2]
    assert (spans[:, 2] < shortest).all(), "a row's newest token is its own"
    return spans[shortest <= window] if window else spans


def _make_ranges(first: Int64, count: Int64) -> Int64:
    """Concatenates ranges of `count[i]` numbers from `first[i]` on."""
    return np.arange(int(count.sum())) + np.repeat(first - np.cumsum(count) + count, count)


def _cut_tiles(rows: Int64, first: Int64, count: Int64, seen: Int64, size: int, causal: bool) -> Int64:
    """Cuts spans of queries into tiles of at most `size`: int64 [1 + n, 4], the number of tiles first."""
    repeats = -(-count // size)
    span = np.repeat(np.arange(len(count)), repeats)
    offset = _make_ranges(np.zeros_like(repeats), repeats) * size
    tiles = np.zeros((len(span) + 1, 4), dtype=np.int64)
    tiles[0, 0] = len(span)
    tiles[1:, 0] = rows[span]
    tiles[1:, 1] = first[span] + offset
    tiles[1:, 2] = np.minimum(count[span] - offset, size)
    tiles[1:, 3] = seen[span] + (offset if causal else 0)
    return tiles
