from __future__ import annotations

import itertools
import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

pytest.importorskip("triton")

from tests.cases.paged import PagedCase
from toka_async.kernels.decode import DecodeConfig, Partial, choose_parts, decode_attention, decode_config, merge
from toka_async.kernels.decode_work import DecodeWork, divide_alike, divide_keys

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EXAMPLES = 60 if DEVICE.type == "cuda" else 3  # the interpreter is slow
SCALE = 0.4
TOLERANCE = {torch.float16: 3e-3, torch.bfloat16: 2e-2}


def room(*shape: int) -> Partial:
    """Memory of partial results [..., heads, dim], of which none may be read before it is written."""
    output = torch.full(shape, torch.nan, device=DEVICE)
    return Partial(output, torch.full(shape[:-1], torch.nan, device=DEVICE))


def run(
    case: PagedCase,
    query: Tensor,
    window: int = 0,
    skip: Tensor | None = None,
    prefix: Partial | None = None,
    work: DecodeWork | None = None,
    config: DecodeConfig | None = None,
    output: Tensor | None = None,
    sinks: Tensor | None = None,
    soft_cap: float = 0.0,
) -> Tensor:
    output = torch.full_like(query, torch.nan) if output is None else output
    config = config or decode_config(case.dim, case.dtype)
    work = work or divide_alike(len(case.lengths), 1, 1, DEVICE)
    partial = room(max(1, work.num_partials), case.heads, case.dim)
    keys, values, page_table, slots = case.cache
    decode_attention(
        query,
        keys,
        values,
        page_table,
        slots,
        case.contexts,
        output,
        SCALE * case.key_scale,
        config,
        work,
        partial,
        window,
        skip,
        prefix,
        case.value_scale,
        sinks,
        soft_cap,
    )
    return output


def divided(case: PagedCase, how: str, skip: Tensor | None = None, window: int = 0) -> DecodeWork:
    """One program for each row, a division into parts alike of which some are empty, or one by the rows' lengths."""
    num_rows = len(case.lengths)
    if how == "whole":
        return divide_alike(num_rows, 1, 1, DEVICE)
    if how == "alike":
        return divide_alike(num_rows, 3, 1, DEVICE)
    return divide_keys(case.contexts, num_rows, skip, window, num_programs=2, is_split=how == "split")


def expected(
    case: PagedCase, query: Tensor, window: int = 0, sinks: Tensor | None = None, soft_cap: float = 0.0
) -> Tensor:
    firsts = [max(0, length - window) if window else 0 for length in case.lengths]
    rows = [
        case.attend(query[row], row, first, length, SCALE, sinks, soft_cap)[0]
        for row, (first, length) in enumerate(zip(firsts, case.lengths, strict=True))
    ]
    return torch.stack(rows).to(query.dtype)


@pytest.mark.parametrize("shape", [(1, 1, 8), (2, 3, 16), (1, 4, 64), (1, 7, 80)], ids=str)
@settings(max_examples=EXAMPLES, deadline=None)
@given(
    seed=st.integers(0, 1000),
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=2),
    page_size=st.sampled_from([1, 5, 16, 64]),
    window=st.sampled_from([0, 0, 1, 30]),
    how=st.sampled_from(["whole", "alike", "split", "ordered"]),
)
def test_equals_the_definition(
    shape: tuple[int, int, int], seed: int, lengths: list[int], page_size: int, window: int, how: str
) -> None:
    case = PagedCase(seed, lengths, page_size, *shape, DEVICE)
    query = case.normal(len(lengths), case.heads, case.dim)
    output = run(case, query, window, work=divided(case, how, window=window))
    torch.testing.assert_close(output, expected(case, query, window), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [0, 330])
def test_long_rows_beside_short_ones(window: int) -> None:
    """Of several parts each, as many as their lengths are worth."""
    case = PagedCase(0, [3, 700, 40, 401, 1], 16, 2, 2, 16, DEVICE)
    query = case.normal(5, case.heads, case.dim)
    work = divide_keys(case.contexts, 5, None, window, num_programs=4)
    parts = {row: count for row, _, count in work.items.tolist() if row >= 0}
    assert parts == {1: 3, 3: 3, 0: 1, 2: 1, 4: 1} if window else {1: 4, 3: 3, 0: 1, 2: 1, 4: 1}
    torch.testing.assert_close(run(case, query, window, work=work), expected(case, query, window), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["whole", "alike"])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_soft_caps(dtype: torch.dtype, how: str, has_sinks: bool) -> None:
    """Scores reach far beyond the cap; those of sinks are not limited."""
    case = PagedCase(1, [70, 5], 16, 2, 3, 16, DEVICE, dtype, is_e4m3=dtype == torch.bfloat16)
    query, sinks = 8 * case.normal(2, case.heads, case.dim), 4 * case.normal(case.heads) if has_sinks else None
    output = run(case, query, 30, work=divided(case, how, window=30), sinks=sinks, soft_cap=2.5)
    tolerance = TOLERANCE.get(dtype, 1e-5) * case.value_scale
    torch.testing.assert_close(output, expected(case, query, 30, sinks, 2.5), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dim", [256, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wide_heads(dim: int, dtype: torch.dtype) -> None:
    case = PagedCase(2, [70, 5], 16, 1, 4, dim, DEVICE, dtype)
    query = 0.2 * case.normal(2, case.heads, case.dim)
    output = run(case, query, work=divided(case, "alike"))
    tolerance = TOLERANCE.get(dtype, 1e-5)
    torch.testing.assert_close(output, expected(case, query), atol=tolerance, rtol=tolerance)


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    seed=st.integers(0, 1000),
    own=st.lists(st.integers(1, 40), min_size=2, max_size=3),
    page_size=st.sampled_from([1, 5, 16]),
    num_shared=st.integers(1, 4),
    window=st.sampled_from([0, 50]),
    how=st.sampled_from(["whole", "alike", "split"]),
    parts=st.sampled_from([1, 2]),
)
def test_goes_on_from_the_attention_of_a_prefix(
    seed: int, own: list[int], page_size: int, num_shared: int, window: int, how: str, parts: int
) -> None:
    """All rows but the first start after a prefix; of two parts, the second has no keys."""
    prefix_keys = num_shared * page_size
    case = PagedCase(seed, [prefix_keys + n for n in own], page_size, 1, 3, 16, DEVICE, num_shared=num_shared)
    query = case.normal(len(own), case.heads, case.dim)
    skip = torch.full((len(own),), prefix_keys, dtype=torch.int32, device=DEVICE)
    skip[0] = 0
    prefix = room(parts, *query.shape)
    for row in range(1, len(own)):
        prefix.output[0, row], prefix.lse[0, row] = case.attend(query[row], row, 0, prefix_keys, SCALE)
    prefix.output[1:, 1:], prefix.lse[1:, 1:] = 0.0, -math.inf
    output = run(case, query, window, skip, prefix, divided(case, how, skip, window))
    torch.testing.assert_close(output, expected(case, query, window), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["whole", "alike", "split"])
@pytest.mark.parametrize("window", [0, 300])
def test_sinks_count_once(dtype: torch.dtype, how: str, window: int) -> None:
    """In rows of several parts, in rows of one, and in rows that go on from a prefix in two parts."""
    case = PagedCase(0, [400, 35, 40], 16, 2, 3, 32, DEVICE, dtype, num_shared=2, is_e4m3=dtype == torch.bfloat16)
    query, sinks = case.normal(3, case.heads, case.dim), 4 * case.normal(case.heads)
    tolerance = TOLERANCE.get(dtype, 1e-5) * case.value_scale
    exact = expected(case, query, window, sinks)
    output = run(case, query, window, work=divided(case, how, window=window), sinks=sinks)
    torch.testing.assert_close(output, exact, atol=tolerance, rtol=tolerance)
    skip = torch.full((3,), 32, dtype=torch.int32, device=DEVICE)
    prefix = room(2, *query.shape)
    for part, row in itertools.product(range(2), range(3)):
        mixed, prefix.lse[part, row] = case.attend(query[row], row, 16 * part, 16 * part + 16, SCALE)
        prefix.output[part, row] = mixed / case.value_scale
    output = run(case, query, window, skip, prefix, divided(case, how, skip, window), sinks=sinks)
    torch.testing.assert_close(output, exact, atol=tolerance, rtol=tolerance)


def test_what_is_skipped_is_not_read() -> None:
    case = PagedCase(0, [40, 35], 16, 1, 2, 16, DEVICE, num_shared=2)
    query = case.normal(2, case.heads, case.dim)
    skip = torch.full((2,), 32, dtype=torch.int32, device=DEVICE)
    partials = [case.attend(query[row], row, 0, 32, SCALE) for row in range(2)]
    outputs, lse = (torch.stack(column)[None].float() for column in zip(*partials, strict=True))
    prefix = Partial(outputs, lse)
    before = expected(case, query)
    case.keys[case.pages[0][:2]] = torch.nan
    torch.testing.assert_close(run(case, query, skip=skip, prefix=prefix), before, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    case = PagedCase(0, [70, 3], 16, 2, 4, 64, DEVICE, dtype)
    query = case.normal(2, case.heads, case.dim)
    output = run(case, query)
    assert output.dtype == dtype
    torch.testing.assert_close(output, expected(case, query), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("how", ["whole", "alike", "split"])
def test_stored_in_e4m3(dtype: torch.dtype, how: str) -> None:
    """Scales are those of all keys and values, of a prefix as well, whose partial result has none."""
    case = PagedCase(0, [300, 35], 16, 2, 3, 32, DEVICE, dtype, num_shared=2, is_e4m3=True)
    query = case.normal(2, case.heads, case.dim)
    tolerance = TOLERANCE.get(dtype, 2e-5) * case.value_scale
    output = run(case, query, work=divided(case, how))
    torch.testing.assert_close(output, expected(case, query), atol=tolerance, rtol=tolerance)
    skip = torch.full((2,), 32, dtype=torch.int32, device=DEVICE)
    partials = [case.attend(query[row], row, 0, 32, SCALE) for row in range(2)]
    outputs, lse = (torch.stack(column)[None].float() for column in zip(*partials, strict=True))
    prefix = Partial(outputs / case.value_scale, lse)
    output = run(case, query, 0, skip, prefix, divided(case, how, skip))
    torch.testing.assert_close(output, expected(case, query), atol=tolerance, rtol=tolerance)


def test_huge_queries_of_keys_in_e4m3_saturate() -> None:
    """Beyond float16, in which they are multiplied."""
    case = PagedCase(0, [20], 16, 1, 2, 16, DEVICE, torch.bfloat16, is_e4m3=True)
    query = case.normal(1, case.heads, case.dim)
    query[0, 0, 0] = 1e30
    output = run(case, query)
    assert output.isfinite().all()
    torch.testing.assert_close(output[0, 1], expected(case, query)[0, 1], atol=0.1, rtol=0.1)


def test_a_partial_result_may_lie_where_the_output_goes() -> None:
    case = PagedCase(0, [40, 35], 16, 1, 2, 16, DEVICE, num_shared=2)
    query = case.normal(2, case.heads, case.dim)
    for how in ("whole", "alike", "split"):
        output = torch.empty_like(query)
        lse = torch.empty(1, 2, case.heads, device=DEVICE)
        for row in range(2):
            output[row], lse[0, row] = case.attend(query[row], row, 0, 32, SCALE)
        skip = torch.full((2,), 32, dtype=torch.int32, device=DEVICE)
        run(case, query, 0, skip, Partial(output[None], lse), divided(case, how, skip), output=output)
        torch.testing.assert_close(output, expected(case, query), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("block", [16, 64, 128])
def test_any_block(block: int) -> None:
    case = PagedCase(0, [100], 16, 1, 2, 16, DEVICE)
    query = case.normal(1, case.heads, case.dim)
    output = run(case, query, config=DecodeConfig(block, num_warps=4, num_stages=1))
    torch.testing.assert_close(output, expected(case, query), atol=1e-5, rtol=1e-5)


def test_large_scores_do_not_overflow() -> None:
    case = PagedCase(0, [40], 16, 1, 1, 16, DEVICE)
    query = 1e4 * case.normal(1, case.heads, case.dim)
    torch.testing.assert_close(run(case, query), expected(case, query), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("stride", "firsts"), [(1, (0, 20, 29)), (3, (0, 1, 2))], ids=["side by side", "in turn"])
def test_merge(stride: int, firsts: tuple[int, int, int]) -> None:
    """Three of the rows have several results; those of the others are not read."""
    heads, generator = 5, torch.Generator().manual_seed(0)
    outputs = torch.randn((64, heads, 20), generator=generator)
    lse = 9 * torch.randn((64, heads), generator=generator)
    rows = ((4, 20), (1, 9), (3, 2))
    expected = torch.full((5, heads, 20), 7.0)
    for (row, count), first in zip(rows, firsts, strict=True):
        own = slice(first, first + count * stride, stride)
        outputs[first, 0], lse[first, 0] = torch.nan, -math.inf  # without keys, and so never written
        weights = (lse[own] * math.log(2)).softmax(0)
        expected[row] = (outputs[own].nan_to_num() * weights[..., None]).sum(0)
    lse[firsts[1], 4] = math.inf
    expected[1, 4] = 7.0  # already there
    entries = [(0, 0, 0), *((row, first, count) for (row, count), first in zip(rows, firsts, strict=True)), (2, 0, 1)]
    merged = torch.full((5, heads, 20), 7.0, device=DEVICE)
    table = torch.tensor(entries, dtype=torch.int32, device=DEVICE)
    merge(Partial(outputs.to(DEVICE), lse.to(DEVICE)), table, stride, merged)
    torch.testing.assert_close(merged.cpu(), expected, atol=1e-5, rtol=1e-5)


def test_few_rows_of_any_length_are_divided_by_their_number() -> None:
    """Programs of each KV head at once, on an H200: of heads of 64 dimensions, then of 128."""
    assert choose_parts(1, 198) == choose_parts(1, 82) == (32, 64)
    assert choose_parts(8, 198) == choose_parts(8, 82) == (16, 128)
    assert choose_parts(64, 198) == (16, 256)
    assert choose_parts(512, 198) == choose_parts(8192, 198) == (4, 512)
    counts = [choose_parts(num_rows, 198)[0] for num_rows in range(1, 1000)]
    assert counts == sorted(counts, reverse=True)


def test_programs_without_keys_leave_nothing_behind() -> None:
    case = PagedCase(3, [5, 70, 33], 16, 2, 2, 16, DEVICE)
    query = case.normal(3, case.heads, case.dim)
    partial = room(12, case.heads, case.dim)
    output = torch.full_like(query, torch.nan)
    work = divide_alike(3, 4, 32, DEVICE)
    config = decode_config(case.dim, case.dtype)
    decode_attention(query, *case.cache, case.contexts, output, SCALE, config, work, partial)
    torch.testing.assert_close(output, expected(case, query), atol=1e-5, rtol=1e-5)
    assert partial.output[:4].isnan().all()  # of the first row, never written and never read


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [8, 64, 128, 256])
@pytest.mark.parametrize("is_short", [True, False])
def test_configurations_fit(head_dim: int, dtype: torch.dtype, is_short: bool) -> None:
    config = decode_config(head_dim, dtype, is_short)
    assert config.block >= 16  # the smallest inner size of a matrix product
    assert (
        2 * config.num_stages * config.block * head_dim * dtype.itemsize <= 64 << 10
    )  # three programs a multiprocessor


@pytest.mark.parametrize("how", ["whole", "alike", "split", "ordered"])
def test_rows_without_keys_are_left_alone(how: str) -> None:
    """They fill up a batch: what their outputs are is somebody else's."""
    case = PagedCase(0, [400, 5, 33], 4, 2, 3, 16, DEVICE)
    query = case.normal(3, 6, 16)
    exact = expected(case, query)
    case.contexts[1] = 0
    output = torch.full_like(query, 7.0)
    run(case, query, work=divided(case, how), output=output)
    assert output[1].eq(7.0).all()
    torch.testing.assert_close(output[[0, 2]], exact[[0, 2]], atol=1e-5, rtol=1e-5)
