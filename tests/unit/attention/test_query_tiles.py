from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from tests.drivers.paged_rows import make_batch
from toka_async.arrays import Int64
from toka_async.attention.base import PrefixGroup
from toka_async.attention.query_tiles import (
    QueryTiles,
    make_chunk_spans,
    make_decode_spans,
    make_prefix_spans,
    split_into_batches,
)


def spans_of(counts: list[int], pages: list[int]) -> QueryTiles:
    index = np.arange(len(counts), dtype=np.int64)
    return QueryTiles(index, index, np.array(counts, np.int64), index, 0 * index, np.array(pages, np.int64))


@given(
    shapes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 500)), max_size=30),
    max_pages=st.integers(1, 600),
    small=st.integers(1, 50),
)
def test_batches_partition_spans_of_similar_shape(shapes: list[tuple[int, int]], max_pages: int, small: int) -> None:
    spans = spans_of([count for count, _ in shapes], [pages for _, pages in shapes])
    parts = list(split_into_batches(spans, max_pages, small))
    assert sorted(row for part in parts for row in part.rows) == list(range(len(shapes)))
    for part in parts:
        assert len(part) == 1 or len(part) * part.num_pages.max() <= max_pages
        if len(part) < len(spans):  # one batch of everything may be uneven by a few spans
            assert 2 * max(part.num_pages.min(), small) >= part.num_pages.max()
            assert 2 * part.counts.min() > part.counts.max() or part.counts.max() == 1 or part.counts.min() == 1


def test_even_spans_keep_their_order() -> None:
    (part,) = split_into_batches(spans_of([1] * 4, [9, 10, 8, 10]), 100, 1)
    assert part.rows.tolist() == [0, 1, 2, 3]


def columns(spans: QueryTiles) -> list[list[int]]:
    arrays: tuple[Int64, ...] = (
        spans.rows,
        spans.tokens,
        spans.counts,
        spans.ends,
        spans.first_pages,
        spans.num_pages,
    )
    return [list(map(int, column)) for column in zip(*arrays, strict=True)]


def test_chunks_are_cut_into_tiles() -> None:
    batch = make_batch([([0], 3, 1), ([1] * 10, 40, 35), ([2] * 3, 9, 9)], 1, 4)
    # row, first token, queries, keys that the first one sees, first page, pages
    assert columns(make_chunk_spans(batch, 4, 0, 40 * 20)) == [
        [1, 1, 20, 6, 0, 7],
        [1, 21, 15, 26, 0, 10],
        [2, 36, 9, 1, 0, 3],
    ]
    assert columns(make_chunk_spans(batch, 4, 6, 40 * 20)) == [
        [1, 1, 20, 6, 0, 7],
        [1, 21, 15, 26, 5, 5],
        [2, 36, 9, 1, 0, 3],
    ]


def test_decoding_rows_skip_what_is_shared_or_out_of_the_window() -> None:
    batch = make_batch([([0] * 5, 20, 1), ([1] * 5, 17, 1)], 2, 4)
    rows, skip = np.arange(2), np.array([3, 0])
    assert columns(make_decode_spans(batch, skip, rows, 4, 0)) == [[0, 0, 1, 20, 3, 2], [1, 1, 1, 17, 0, 5]]
    assert columns(make_decode_spans(batch, 0 * skip, rows, 4, 5)) == [[0, 0, 1, 20, 3, 2], [1, 1, 1, 17, 3, 2]]


def test_prefixes_are_cut_by_rows() -> None:
    groups = [PrefixGroup(2, 40, 3), PrefixGroup(50, 2, 1)]
    assert columns(make_prefix_spans(groups, 4, 12 * 30)) == [
        [2, 2, 30, 12, 0, 3],
        [2, 32, 10, 12, 0, 3],
        [50, 50, 2, 4, 0, 1],
    ]
