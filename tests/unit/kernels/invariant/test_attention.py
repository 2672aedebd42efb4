from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from tests.cases.paged import PagedCase
from toka_async.kernels.invariant.attention import QueryTile, attend_tiles, choose_query_tile

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EXAMPLES = 60 if DEVICE.type == "cuda" else 6  # the interpreter is slow
SCALE = 0.4
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
SMALL = QueryTile(block_queries=16, block_keys=16, num_warps=4, num_stages=2)


def attend(
    case: PagedCase,
    query: torch.Tensor,
    cuts: list[list[int]],
    window: int,
    config: QueryTile = SMALL,
    sinks: torch.Tensor | None = None,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """Attends all tokens of all rows, each row cut into tiles of so many queries. query: [tokens, heads, dim]."""
    tiles, token = [], 0
    for row, counts in enumerate(cuts):
        assert sum(counts) == case.lengths[row]
        seen = 1
        for count in counts:
            assert count <= config.count_queries(case.group)
            tiles.append((row, token, count, seen))
            token, seen = token + count, seen + count
    table = torch.tensor(tiles, dtype=torch.int32, device=DEVICE)
    output = torch.full_like(query, math.nan)
    scales = SCALE * case.key_scale, window, config, case.value_scale
    attend_tiles(query, *case.cache, table, output, *scales, sinks, soft_cap)
    return output


def cut(length: int, most: int) -> list[int]:
    return [min(most, length - first) for first in range(0, length, most)]


def check(
    case: PagedCase, window: int, config: QueryTile, sinks: torch.Tensor | None = None, soft_cap: float = 0.0
) -> None:
    query = case.normal(sum(case.lengths), case.heads, case.dim)
    most = config.count_queries(case.group)
    output = attend(case, query, [cut(length, most) for length in case.lengths], window, config, sinks, soft_cap)
    token = 0
    for row, length in enumerate(case.lengths):
        for end in range(1, length + 1):
            first = max(0, end - window) if window else 0
            expected = case.attend(query[token], row, first, end, SCALE, sinks, soft_cap)[0].to(case.dtype)
            tolerance = TOLERANCE[case.dtype] * case.value_scale
            torch.testing.assert_close(output[token], expected, atol=tolerance, rtol=tolerance)
            token += 1


@pytest.mark.parametrize("shape", [(1, 1, 8), (2, 3, 16), (1, 7, 80)], ids=str)
@settings(max_examples=EXAMPLES, deadline=None)
@given(
    seed=st.integers(0, 1000),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=2),
    page_size=st.sampled_from([1, 5, 16, 64]),
    window=st.sampled_from([0, 0, 1, 7, 20]),
)
def test_it_equals_attention(
    shape: tuple[int, int, int], seed: int, lengths: list[int], page_size: int, window: int
) -> None:
    check(PagedCase(seed, lengths, page_size, *shape, DEVICE), window, SMALL)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_it_equals_attention_with_the_tile_that_is_used(dtype: torch.dtype) -> None:
    case = PagedCase(0, [70], 16, 1, 4, 64, DEVICE, dtype)
    check(case, 0, choose_query_tile(64, 4, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_equals_attention_over_a_cache_in_e4m3(dtype: torch.dtype) -> None:
    check(PagedCase(0, [40], 16, 1, 3, 32, DEVICE, dtype, is_e4m3=True), 20, SMALL)


@pytest.mark.parametrize("window", [0, 20])
def test_sinks(window: int) -> None:
    case = PagedCase(0, [40, 3], 16, 2, 3, 16, DEVICE)
    check(case, window, SMALL, 4 * case.normal(case.heads))


@pytest.mark.parametrize("window", [0, 20])
def test_soft_caps(window: int) -> None:
    case = PagedCase(0, [40, 3], 16, 2, 3, 16, DEVICE)
    check(case, window, SMALL, 4 * case.normal(case.heads), soft_cap=0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_wide_heads(dtype: torch.dtype) -> None:
    case = PagedCase(0, [9], 16, 1, 2, 512, DEVICE, dtype)
    check(case, 0, choose_query_tile(512, 2, dtype))


@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data(), seed=st.integers(0, 1000), window=st.sampled_from([0, 1, 9, 30]))
def test_cuts_and_neighbours_change_no_bit(data: st.DataObject, seed: int, window: int) -> None:
    """Token by token, as when decoding, or in tiles of any sizes; alone or beside another row."""
    length, other = data.draw(st.integers(1, 45)), data.draw(st.integers(1, 20))
    case = PagedCase(seed, [length, other], 5, 1, 3, 16, DEVICE)
    query = case.normal(length + other, case.heads, case.dim)
    alone = attend(case, query, [[1] * length, [1] * other], window)
    cuts: list[int] = []
    while sum(cuts) < length:
        cuts.append(data.draw(st.integers(1, min(5, length - sum(cuts)))))
    together = attend(case, query, [cuts, cut(other, 5)], window)
    assert torch.equal(together, alone)


def test_a_window_that_no_row_outgrows_changes_no_bit() -> None:
    case = PagedCase(3, [33], 5, 2, 2, 16, DEVICE)
    query = case.normal(33, case.heads, case.dim)
    assert torch.equal(attend(case, query, [cut(33, 8)], 33), attend(case, query, [cut(33, 8)], 0))
