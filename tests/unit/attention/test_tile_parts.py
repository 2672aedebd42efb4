from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

pytest.importorskip("triton")

from toka_async.arrays import Int64
from toka_async.attention.tile_parts import LEAST_KEYS, choose_share, keep_tiles, split_tiles
from toka_async.kernels.decode_work import MOST_PARTS

QUERIES, BLOCK = 32, 64


def tile_table(*tiles: tuple[int, int, int, int]) -> Int64:
    """Rows, first queries, numbers of queries, and keys that the first query sees."""
    return np.array([(len(tiles), 0, 0, 0), *tiles], dtype=np.int64)


def chunk(length: int, before: int) -> Int64:
    return tile_table(*((0, i, min(QUERIES, length - i), before + i + 1) for i in range(0, length, QUERIES)))


def test_a_few_tokens_after_a_long_context_have_as_many_parts_as_run_at_once() -> None:
    split = split_tiles(chunk(200, 100_000), 0, QUERIES, BLOCK, num_programs=33)
    assert split is not None
    assert split.tiles[0, 0] == len(split.parts) == 7 * 4
    assert split.num_partials == 28
    lengths = split.parts[:, 1] - split.parts[:, 0]
    assert lengths.max() <= 1.01 * lengths.min() + BLOCK
    assert split.merged[:, 0].tolist() == list(range(200))
    assert set(split.merged[:, 2].tolist()) == {4}


@pytest.mark.parametrize("table", [chunk(4096, 0), chunk(64, 900), chunk(2048, 8192), tile_table()], ids=len)
def test_tiles_that_fill_the_chip_or_are_short_stay_whole(table: Int64) -> None:
    assert split_tiles(table, 0, QUERIES, BLOCK, num_programs=33) is None


def test_a_long_tile_among_many_short_ones_is_split_alone() -> None:
    table = tile_table(*((1, 32 * i, 32, 32 * i + 1) for i in range(64)), (0, 2048, 5, 90_001))
    split = split_tiles(table, 0, QUERIES, BLOCK, num_programs=33)
    assert split is not None
    assert split.merged[:, 0].tolist() == list(range(2048, 2053))
    places = split.parts[:, 2]
    assert sorted(places[places >= 0].tolist()) == list(range(split.num_partials))
    assert (places < 0).sum() == 64
    lengths = split.parts[:, 1] - split.parts[:, 0]
    assert (np.diff(lengths) <= 0).all()  # the most keys first


@given(
    chunks=st.lists(st.tuples(st.integers(1, 150), st.integers(0, 40_000)), min_size=1, max_size=4),
    window=st.sampled_from([0, 1, 100, 3000]),
    num_programs=st.sampled_from([1, 8, 33, 264]),
)
def test_every_key_of_a_tile_is_in_one_part(chunks: list[tuple[int, int]], window: int, num_programs: int) -> None:
    tiles, first = [], 0
    for row, (length, before) in enumerate(chunks):
        tiles += [(row, first + i, min(QUERIES, length - i), before + i + 1) for i in range(0, length, QUERIES)]
        first += length
    split = split_tiles(tile_table(*tiles), window, QUERIES, BLOCK, num_programs)
    if split is None:
        return
    found: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for tile, part in zip(split.tiles[1:].tolist(), split.parts.tolist(), strict=True):
        found.setdefault(tuple(tile), []).append(tuple(part))
    assert set(found) == set(tiles)
    merged = {query: (place, count) for query, place, count in split.merged.tolist()}
    for (_, query, count, seen), parts in found.items():
        parts.sort()
        assert parts[0][0] == (max(0, seen - window) // BLOCK * BLOCK if window else 0)
        assert parts[-1][1] == seen + count - 1
        assert [end for _, end, _ in parts[:-1]] == [start for start, _, _ in parts[1:]]
        assert all((end - start) % BLOCK == 0 and end > start for start, end, _ in parts[:-1])
        assert len(parts) <= MOST_PARTS
        places = [place for *_, place in parts]
        if len(parts) == 1:
            assert places == [-1]
            assert query not in merged
        else:
            assert places == list(range(places[0], places[0] + len(parts)))
            assert [merged[query + i] for i in range(count)] == [
                (places[0] * QUERIES + i, len(parts)) for i in range(count)
            ]
            assert parts[0][1] - parts[0][0] >= LEAST_KEYS / 2
    assert len(split.parts) <= len(tiles) + num_programs
    assert split.num_partials <= 2 * num_programs


@pytest.mark.parametrize("window", [0, 40])
def test_whole_tiles_are_one_part_each(window: int) -> None:
    """The part with the most keys is the first. A part begins with a block, some of whose keys nobody may see."""
    kept = keep_tiles(chunk(70, 100), window, BLOCK)
    tiles = {170: [0, 64, 6, 165], 164: [0, 32, 32, 133], 132: [0, 0, 32, 101]}
    parts = [[0, 132, -1], [64, 170, -1], [64, 164, -1]] if window else [[0, end, -1] for end in (170, 164, 132)]
    assert kept.parts.tolist() == parts
    assert kept.tiles.tolist() == [[3, 0, 0, 0], *(tiles[end] for _, end, _ in parts)]
    assert kept.merged.shape == (0, 3)


def test_shares() -> None:
    assert choose_share(np.array([500]), 33) == LEAST_KEYS
    assert choose_share(np.full(7, 100_000), 33) == 26_924  # 4 parts of each: 28 of 33
    assert choose_share(np.full(33, 100_000), 33) == 100_000
    assert choose_share(np.array([100_000, *[1000] * 99]), 33) == 6031
    assert choose_share(np.array([], dtype=np.int64), 33) == LEAST_KEYS
