from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

pytest.importorskip("triton")

from tests.cases.paged import PagedCase
from toka_async.kernels.decode import Partial, merge
from toka_async.kernels.prefill import PrefillConfig, attend_chunks, attend_prefixes, list_prefill_configs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EXAMPLES = 60 if DEVICE.type == "cuda" else 3  # the interpreter is slow
SCALE = 0.4
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
Tile = tuple[int, int, int, int]
SMALL = PrefillConfig(block_queries=16, block_keys=16, num_warps=4, num_stages=2)


def tile_table(tiles: list[Tile]) -> torch.Tensor:
    return torch.tensor([(len(tiles), 0, 0, 0), *tiles], dtype=torch.int32, device=DEVICE)


def check_chunks(
    case: PagedCase,
    window: int,
    config: PrefillConfig,
    num_programs: int = 0,
    is_split: bool = False,
    has_sinks: bool = False,
    soft_cap: float = 0.0,
    scale_of_queries: float = 1.0,
) -> None:
    """Each row's keys are cut into a context and a chunk, whose last tile is the shortest."""
    sinks = 4 * case.normal(case.heads) if has_sinks else None
    tiles, expected = [], []
    size, token = config.queries(case.group), 0
    chunks = [max(1, length * 2 // 3) for length in case.lengths]
    query = scale_of_queries * case.normal(sum(chunks), case.heads, case.dim)
    for row, (length, chunk) in enumerate(zip(case.lengths, chunks, strict=True)):
        for offset in range(0, chunk, size):
            tiles.append((row, token + offset, min(size, chunk - offset), length - chunk + offset + 1))
        for end in range(length - chunk + 1, length + 1):
            first = max(0, end - window) if window else 0
            expected.append(case.attend(query[token], row, first, end, SCALE, sinks, soft_cap)[0])
            token += 1
    output = torch.full_like(query, math.nan)
    part_keys = 2 * config.block_keys if is_split else 0
    attend_in_parts(case, query, tiles, output, window, config, part_keys, num_programs, sinks, soft_cap)
    tolerance = TOLERANCE[case.dtype] * case.value_scale
    torch.testing.assert_close(output, torch.stack(expected).to(case.dtype), atol=tolerance, rtol=tolerance)


def attend_in_parts(
    case: PagedCase,
    query: torch.Tensor,
    tiles: list[Tile],
    output: torch.Tensor,
    window: int,
    config: PrefillConfig,
    part_keys: int,
    num_programs: int,
    sinks: torch.Tensor | None,
    soft_cap: float,
) -> None:
    """Each tile has a part for each `part_keys` keys; 0: it has one."""
    of_parts: list[Tile] = []
    parts: list[tuple[int, int, int]] = []
    merged: list[tuple[int, int, int]] = []
    size = config.queries(case.group)
    for row, first, count, seen in tiles:
        low, high = max(0, seen - window) if window else 0, seen + count - 1
        low = low // config.block_keys * config.block_keys
        starts = range(low, high, part_keys or high)
        number = len(parts)
        of_parts += [(row, first, count, seen)] * len(starts)
        parts += [(start, min(start + starts.step, high), number + i) for i, start in enumerate(starts)]
        if len(starts) == 1:
            parts[-1] = (low, high, -1)
        else:
            merged += [(first + i, number * size + i, len(starts)) for i in range(count)]
    shape = (len(parts) * size, case.heads, case.dim)
    partial = Partial(torch.full(shape, math.nan, device=DEVICE), torch.full(shape[:2], math.nan, device=DEVICE))
    table = torch.tensor(parts, dtype=torch.int32, device=DEVICE)
    keys, values, page_table, slots = case.cache
    attend_chunks(
        query,
        keys,
        values,
        page_table,
        slots,
        tile_table(of_parts),
        num_programs or len(parts),
        output,
        SCALE * case.key_scale,
        window,
        config,
        table,
        partial,
        case.value_scale,
        sinks,
        soft_cap,
    )
    if merged:
        merge(partial, torch.tensor(merged, dtype=torch.int32, device=DEVICE), size, output)


@pytest.mark.parametrize("shape", [(1, 1, 8), (2, 3, 16), (1, 4, 64), (1, 7, 80)], ids=str)
@settings(max_examples=EXAMPLES, deadline=None)
@given(
    seed=st.integers(0, 1000),
    lengths=st.lists(st.integers(1, 25), min_size=1, max_size=2),
    page_size=st.sampled_from([1, 5, 16, 64]),
    window=st.sampled_from([0, 0, 1, 7, 20]),
)
def test_chunks(shape: tuple[int, int, int], seed: int, lengths: list[int], page_size: int, window: int) -> None:
    check_chunks(PagedCase(seed, lengths, page_size, *shape, DEVICE), window, SMALL)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dim", [64, 128, 160])
def test_chunks_as_configured(dim: int, dtype: torch.dtype) -> None:
    case = PagedCase(0, [140] if dtype == torch.bfloat16 else [40], 16, 1, 4, dim, DEVICE, dtype)
    for config in list_prefill_configs(dim, 4, dtype):
        check_chunks(case, 0, config)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_split", [False, True])
def test_chunks_of_a_cache_in_e4m3(dtype: torch.dtype, is_split: bool) -> None:
    case = PagedCase(0, [70, 9], 16, 1, 4, 80, DEVICE, dtype, is_e4m3=True)
    check_chunks(case, 0, SMALL, is_split=is_split)
    check_chunks(case, 30, list_prefill_configs(80, 4, dtype)[-1])


@pytest.mark.parametrize("shape", [(2, 3, 16), (1, 7, 80)], ids=str)
@settings(max_examples=EXAMPLES, deadline=None)
@given(
    seed=st.integers(0, 1000),
    length=st.integers(30, 70),
    page_size=st.sampled_from([1, 5, 16, 64]),
    window=st.sampled_from([0, 0, 1, 7, 40]),
)
def test_parts_of_tiles(shape: tuple[int, int, int], seed: int, length: int, page_size: int, window: int) -> None:
    """Some of a tile's queries see no key of its last part."""
    case = PagedCase(seed, [length, 5], page_size, *shape, DEVICE)
    check_chunks(case, window, SMALL, is_split=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 7, 40])
@pytest.mark.parametrize("is_split", [False, True])
def test_sinks_count_once(dtype: torch.dtype, window: int, is_split: bool) -> None:
    case = PagedCase(window, [70, 5], 16, 2, 3, 16, DEVICE, dtype, is_e4m3=dtype == torch.bfloat16)
    check_chunks(case, window, SMALL, is_split=is_split, has_sinks=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("is_split", [False, True])
def test_soft_caps(dtype: torch.dtype, window: int, is_split: bool) -> None:
    """Scores reach far beyond the cap; those of sinks are not limited."""
    case = PagedCase(window, [70, 5], 16, 2, 3, 16, DEVICE, dtype, is_e4m3=dtype == torch.bfloat16)
    check_chunks(case, window, SMALL, is_split=is_split, has_sinks=is_split, soft_cap=2.5, scale_of_queries=8.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_wide_heads(dtype: torch.dtype) -> None:
    case = PagedCase(0, [40], 16, 1, 4, 512, DEVICE, dtype)
    for config in list_prefill_configs(512, 4, dtype):
        check_chunks(case, 0, config, scale_of_queries=0.2)


def test_parts_as_configured() -> None:
    case = PagedCase(0, [150], 16, 1, 4, 64, DEVICE, torch.bfloat16)
    check_chunks(case, 0, list_prefill_configs(64, 4, torch.bfloat16)[0], is_split=True)


@pytest.mark.parametrize("window", [0, 9])
def test_few_programs_go_through_all_tiles(window: int) -> None:
    check_chunks(PagedCase(0, [20, 14], 16, 1, 2, 16, DEVICE), window, SMALL, num_programs=2)


@pytest.mark.parametrize("shape", [(1, 1, 8), (2, 3, 16), (1, 7, 80)], ids=str)
@settings(max_examples=EXAMPLES, deadline=None)
@given(
    seed=st.integers(0, 1000),
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=2),
    page_size=st.sampled_from([1, 5, 16]),
    num_pages=st.integers(1, 3),
    splits=st.sampled_from([1, 3]),
)
def test_prefixes(
    shape: tuple[int, int, int], seed: int, counts: list[int], page_size: int, num_pages: int, splits: int
) -> None:
    keys = num_pages * page_size
    case = PagedCase(seed, [keys + 1] * (1 + len(counts)), page_size, *shape, DEVICE)
    check_prefixes(case, counts, num_pages, splits, SMALL)


def test_prefixes_with_a_soft_cap() -> None:
    case = PagedCase(0, [33] * 3, 16, 2, 3, 16, DEVICE)
    check_prefixes(case, [5, 2], 2, 2, SMALL, soft_cap=0.5)


def check_prefixes(
    case: PagedCase, counts: list[int], num_pages: int, splits: int, config: PrefillConfig, soft_cap: float = 0.0
) -> None:
    """The first row is in no group, each group reads the pages of one row; splits are merged to the whole.

    The result is that of the numbers as they are stored, without the scale of values.
    """
    keys = num_pages * case.page_size
    query = case.normal(1 + sum(counts), case.heads, case.dim)
    tiles, size, token = [], config.queries(case.group), 1
    for row, count in enumerate(counts, 1):
        tiles += [(row, token + i, min(size, count - i), keys) for i in range(0, count, size)]
        token += count
    output = torch.full((splits, *query.shape), math.nan, device=DEVICE)
    result = Partial(output, torch.full(output.shape[:3], math.nan, device=DEVICE))
    options = SCALE * case.key_scale, config, soft_cap
    attend_prefixes(query, *case.cache, tile_table(tiles), len(tiles), result, *options)
    assert result.output[:, 0].isnan().all(), "the row in no group is left alone"
    owners = [row for row, count in enumerate(counts, 1) for _ in range(count)]
    exact = [case.attend(query[1 + i], row, 0, keys, SCALE, None, soft_cap) for i, row in enumerate(owners)]
    lse = torch.logsumexp(result.lse[:, 1:] * math.log(2), 0) / math.log(2)
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(lse, torch.stack([x for _, x in exact]).float(), atol=tolerance, rtol=tolerance)
    weights = torch.exp2(result.lse[:, 1:] - lse)[..., None]
    merged = (result.output[:, 1:] * weights).sum(0)
    expected = torch.stack([x for x, _ in exact]).float() / case.value_scale
    torch.testing.assert_close(merged, expected, atol=tolerance, rtol=tolerance)


def test_no_tiles() -> None:
    case = PagedCase(0, [9], 4, 1, 2, 16, DEVICE)
    query = case.normal(3, case.heads, case.dim)
    result = Partial(torch.zeros(1, *query.shape, device=DEVICE), torch.zeros(1, 3, 2, device=DEVICE))
    attend_prefixes(query, *case.cache, tile_table([]), 2, result, SCALE, SMALL)
    assert not result.output.any()


def test_tiles_hold_whole_queries() -> None:
    assert SMALL.queries(7) == 2
    assert SMALL.queries(16) == 1
    assert all(config.queries(200) == 1 for config in list_prefill_configs(64, 200, torch.bfloat16))
