"""Steps in parts: nothing is lost, nothing changes its order, and parts are even."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toka_async.attention.base import PrefixGroup
from toka_async.runner.inputs import StepRows
from toka_async.runner.micro_batches import Cutter, MicroBatch, count_most_rows, count_most_tokens


def step_rows(num_decode: int, chunks: list[tuple[int, int, bool]]) -> StepRows:
    """chunks: tokens, tokens of the row before them, whether the last one is sampled from."""
    lengths = np.array([1] * num_decode + [length for length, _, _ in chunks], dtype=np.int32)
    before = np.array([*range(num_decode), *(start for _, start, _ in chunks)], dtype=np.int64)
    return StepRows(
        num_decode=num_decode,
        slots=np.arange(100, 100 + lengths.size, dtype=np.int32),
        lengths=lengths,
        contexts=before + lengths,
        firsts=np.cumsum(lengths, dtype=np.int64) - lengths,
        samples=np.array([True] * num_decode + [sampled for *_, sampled in chunks], dtype=np.bool_),
    )


CHUNKS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 9), st.booleans()), max_size=6)


def tokens_of(rows: StepRows, chunks: bool) -> list[tuple[int, int]]:
    """(slot, place in the row) of each token of the decoding rows, or of the chunks, in order."""
    part = slice(rows.num_decode, None) if chunks else slice(rows.num_decode)
    columns = (rows.slots[part].tolist(), rows.contexts[part].tolist(), rows.lengths[part].tolist())
    return [(slot, place) for slot, end, length in zip(*columns, strict=True) for place in range(end - length, end)]


@given(st.integers(0, 30), CHUNKS, st.integers(1, 9), st.integers(1, 12))
def test_parts_make_up_the_step(
    num_decode: int, chunks: list[tuple[int, int, bool]], num_parts: int, least_tokens: int
) -> None:
    rows = step_rows(num_decode, chunks)
    parts = Cutter(num_parts, least_tokens).cut(rows, ())
    assert len(parts) <= num_parts
    assert [token for part in parts for token in tokens_of(part.rows, False)] == tokens_of(rows, False)
    assert [token for part in parts for token in tokens_of(part.rows, True)] == tokens_of(rows, True)
    places = [place for part in parts for place in places_of(part)]
    assert sorted(places) == [*range(int(rows.samples.sum()))]
    sampled = rows.list_sampling()
    for part in parts:
        assert part.rows.slots.size
        assert part.rows.firsts.tolist() == (np.cumsum(part.rows.lengths) - part.rows.lengths).tolist()
        for place, slot, context in zip(places_of(part), *part.rows.list_sampling(), strict=True):
            assert (sampled[0][place], sampled[1][place]) == (slot, context)


def places_of(part: MicroBatch) -> list[int]:
    return [*range(int(part.rows.samples.sum()))] if part.places is None else part.places.tolist()


@given(st.integers(0, 30), CHUNKS, st.integers(2, 9), st.integers(1, 12))
def test_parts_are_even(
    num_decode: int, chunks: list[tuple[int, int, bool]], num_parts: int, least_tokens: int
) -> None:
    parts = Cutter(num_parts, least_tokens).cut(step_rows(num_decode, chunks), ())
    num_tokens = sum(length for length, *_ in chunks)
    assert len(parts) >= min(num_parts, num_decode)
    counts = [part.rows.num_decode for part in parts] or [0]
    assert max(counts) - min(counts) <= 1
    assert max(counts) <= count_most_rows(num_decode, num_parts)
    most = count_most_tokens(num_decode, num_decode + num_tokens, num_parts, least_tokens)
    of_chunks = [int(part.rows.lengths[part.rows.num_decode :].sum()) for part in parts]
    assert all(decode + chunk <= most for decode, chunk in zip(counts, of_chunks, strict=False))
    with_chunks = [tokens for tokens in of_chunks if tokens]
    assert of_chunks[: len(with_chunks)] == with_chunks  # the first ones
    if len(with_chunks) > 1:
        assert max(with_chunks) - min(with_chunks) <= 1
        assert max(with_chunks) >= min(least_tokens, -(-num_tokens // len(with_chunks)))


@given(st.integers(1, 60), st.integers(2, 9), st.data())
def test_groups_are_cut_with_their_rows(num_decode: int, num_parts: int, data: st.DataObject) -> None:
    edges = sorted(data.draw(st.sets(st.integers(0, num_decode), max_size=8)))
    pairs = [(a, b) for a, b in pairwise(edges) if b - a > 1 and data.draw(st.booleans())]
    groups = [PrefixGroup(a, b - a, 1 + i) for i, (a, b) in enumerate(pairs)]
    parts = Cutter(num_parts).cut(step_rows(num_decode, []), groups)
    pages = {row: g.num_pages for g in groups for row in range(g.first_row, g.first_row + g.num_rows)}
    for part in parts:
        end, grouped = 0, set()
        for group in part.groups:
            assert group.first_row >= end
            assert group.num_rows >= 2
            end = group.first_row + group.num_rows
            for row in range(group.first_row, end):
                assert pages[part.first_row + row] == group.num_pages
                grouped.add(row)
        assert end <= part.rows.num_decode
        alone = [row for row in range(part.rows.num_decode) if row not in grouped and part.first_row + row in pages]
        for row in alone:  # no neighbour of its group is in the part
            number = pages[part.first_row + row]
            assert pages.get(part.first_row + row - 1) != number or row == 0
            assert pages.get(part.first_row + row + 1) != number or row == part.rows.num_decode - 1


def test_slots_are_the_same_arrays_while_rows_stay() -> None:
    """What is known of them need not be looked up again."""
    cutter, rows = Cutter(3), step_rows(7, [])
    first, again = cutter.cut(rows, ()), cutter.cut(rows, ())
    assert [a.rows.slots is b.rows.slots for a, b in zip(first, again, strict=True)] == [True] * 3
    other = cutter.cut(step_rows(7, []), ())
    assert not any(a.rows.slots is b.rows.slots for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("num_parts", [1, 4])
def test_a_step_without_rows_has_no_parts(num_parts: int) -> None:
    assert Cutter(num_parts).cut(step_rows(0, []), ()) == []


def test_one_part_is_the_step() -> None:
    rows, groups = step_rows(3, [(5, 0, True)]), (PrefixGroup(0, 2, 1),)
    (part,) = Cutter(1).cut(rows, groups)
    assert part.rows is rows
    assert part.groups == groups
    assert part.places is None
