"""Cuts a step's rows into spans, and sorts the spans into batches of similar size.

A span is a run of queries of one row that reads a run of the row's pages. Works on the host, in NumPy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from toka_async.arrays import Bool, Int64
from toka_async.attention.base import AttentionBatch, PrefixGroup


@dataclass(slots=True, frozen=True)
class QueryTiles:
    """Columns of spans, int64 [n] each.

    rows: of the page table. tokens: the first query. counts: queries. ends: keys that the first query sees, counted
    from the row's first token; `causal`: each further query sees one more. first_pages, num_pages: the pages to read.
    """

    rows: Int64
    tokens: Int64
    counts: Int64
    ends: Int64
    first_pages: Int64
    num_pages: Int64
    causal: bool = True

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, index: Int64) -> QueryTiles:
        return QueryTiles(
            self.rows[index],
            self.tokens[index],
            self.counts[index],
            self.ends[index],
            self.first_pages[index],
            self.num_pages[index],
            self.causal,
        )


def make_spans(
    rows: Int64, tokens: Int64, counts: Int64, ends: Int64, skip: Int64, page_size: int, window: int
) -> QueryTiles:
    """Makes causal spans that read from page `skip`, or from their first query's window, to their end."""
    first_pages = np.maximum(skip, np.maximum(ends - window, 0) // page_size) if window else skip
    last_pages = -(-(ends + counts - 1) // page_size)
    return QueryTiles(rows, tokens, counts, ends, first_pages, last_pages - first_pages)


def make_decode_spans(batch: AttentionBatch, skip: Int64, rows: Int64, page_size: int, window: int) -> QueryTiles:
    """Makes a span for each of the decoding `rows`, without the row's `skip` leading pages."""
    ends = batch.context_lengths[rows].astype(np.int64)
    return make_spans(rows, rows, np.ones_like(rows), ends, skip[rows], page_size, window)


def make_chunk_spans(batch: AttentionBatch, page_size: int, window: int, cells: int) -> QueryTiles:
    """Cuts chunks of prompts into spans whose queries times keys stay below about `cells`."""
    lengths = batch.query_lengths[batch.num_decode :].astype(np.int64)
    ends = batch.context_lengths[batch.num_decode :].astype(np.int64)
    tiles = np.maximum(16, cells // np.maximum(ends, 1))
    repeats = -(-lengths // tiles)  # spans of each chunk
    chunk = np.repeat(np.arange(len(lengths)), repeats)
    offsets = (np.arange(len(chunk)) - np.repeat(np.cumsum(repeats) - repeats, repeats)) * tiles[chunk]
    counts = np.minimum(tiles[chunk], lengths[chunk] - offsets)
    tokens = (batch.num_decode + np.cumsum(lengths) - lengths)[chunk] + offsets
    seen = (ends - lengths)[chunk] + offsets + 1
    return make_spans(batch.num_decode + chunk, tokens, counts, seen, np.zeros_like(chunk), page_size, window)


def make_prefix_spans(groups: Sequence[PrefixGroup], page_size: int, cells: int) -> QueryTiles:
    """Makes spans of all rows of a group over its shared pages, cut like chunks."""
    columns: list[tuple[int, int, int, int]] = []
    for group in groups:
        tile = max(16, cells // (group.num_pages * page_size))
        for offset in range(0, group.num_rows, tile):
            count = min(tile, group.num_rows - offset)
            columns.append((group.first_row, group.first_row + offset, count, group.num_pages))
    rows, tokens, counts, pages = np.array(columns, dtype=np.int64).reshape(-1, 4).T
    return QueryTiles(rows, tokens, counts, pages * page_size, np.zeros_like(rows), pages, causal=False)


def split_into_batches(spans: QueryTiles, max_pages: int, small: int) -> Iterator[QueryTiles]:
    """Splits spans into batches of similar shape, none of more than `max_pages` pages, padding counted.

    No span of a batch has less than half of the largest's pages or queries. Spans of at most `small` pages are alike.
    """
    if not len(spans):
        return
    if _is_even(spans, max_pages, small):
        yield spans
        return
    classes = np.ceil(np.log2(spans.counts)).astype(np.int64)
    order = np.lexsort((-spans.num_pages, classes))
    classes, pages = classes[order], spans.num_pages[order]
    weights = np.maximum(pages, small)
    start = 0
    while start < len(order):
        alike: Bool = (classes[start:] == classes[start]) & (2 * weights[start:] >= weights[start])
        run = len(alike) if alike.all() else int(alike.argmin())
        run = min(run, max(1, max_pages // int(pages[start])))
        yield spans.take(order[start : start + run])
        start += run


def _is_even(spans: QueryTiles, max_pages: int, small: int) -> bool:
    """Tells whether one batch of all will do: the same counts, about the same pages, and not too many."""
    most = int(spans.num_pages.max())
    return (
        len(spans) * most <= max_pages
        and int(spans.counts.max()) == int(spans.counts.min())
        and len(spans) * max(most, small) <= 1.25 * int(np.maximum(spans.num_pages, small).sum())
    )
