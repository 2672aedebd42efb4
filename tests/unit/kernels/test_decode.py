from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

pytest.importorskip("triton")

from tests.cases.paged import PagedCase
from toka_async.kernels.decode import (
    MANY_ROWS,
    MOST_PARTIALS,
    DecodeConfig,
    Partial,
    Splits,
    choose_graph_splits,
    choose_splits,
    decode_attention,
    decode_config,
    merge,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EXAMPLES = 60 if DEVICE.type == "cuda" else 3  # the interpreter is slow
SCALE = 0.4
TOLERANCE = {torch.float16: 3e-3, torch.bfloat16: 2e-2}


def room(parts: int, query: Tensor) -> Partial:
    """Memory of partial results, of which none may be read before it is written."""
    output = torch.full((parts, *query.shape), torch.nan, device=query.device)
    return Partial(output, torch.full((parts, *query.shape[:2]), torch.nan, device=query.device))


def run(
    case: PagedCase,
    query: Tensor,
    window: int = 0,
    splits: int = 1,
    skip: Tensor | None = None,
    prefix: Partial | None = None,
    config: DecodeConfig | None = None,
    partial: Partial | None = None,
    least: int = 1,
    output: Tensor | None = None,
) -> Tensor:
    output = torch.full_like(query, torch.nan) if output is None else output
    order = torch.randperm(len(query), dtype=torch.int32).to(DEVICE)
    partial = room(splits, query) if splits > 1 else partial
    rest = (window, skip, prefix, partial)
    decode_attention(query, *case.cache, case.contexts, order, output, SCALE, *rest, least=least, config=config)
    return output


def expected(case: PagedCase, query: Tensor, window: int = 0) -> Tensor:
    firsts = [max(0, length - window) if window else 0 for length in case.lengths]
    rows = [
        case.attend(query[row], row, first, length, SCALE)[0]
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
    splits=st.sampled_from([1, 3]),
)
def test_equals_the_definition(
    shape: tuple[int, int, int], seed: int, lengths: list[int], page_size: int, window: int, splits: int
) -> None:
    case = PagedCase(seed, lengths, page_size, *shape, DEVICE)
    query = case.normal(len(lengths), case.heads, case.dim)
    torch.testing.assert_close(run(case, query, window, splits), expected(case, query, window), atol=1e-5, rtol=1e-5)


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    seed=st.integers(0, 1000),
    own=st.lists(st.integers(1, 40), min_size=2, max_size=3),
    page_size=st.sampled_from([1, 5, 16]),
    num_shared=st.integers(1, 4),
    window=st.sampled_from([0, 50]),
    splits=st.sampled_from([1, 3]),
    parts=st.sampled_from([1, 2]),
)
def test_goes_on_from_the_attention_of_a_prefix(
    seed: int, own: list[int], page_size: int, num_shared: int, window: int, splits: int, parts: int
) -> None:
    """All rows but the first start after a prefix; of two parts, the second has no keys."""
    prefix_keys = num_shared * page_size
    case = PagedCase(seed, [prefix_keys + n for n in own], page_size, 1, 3, 16, DEVICE, num_shared=num_shared)
    query = case.normal(len(own), case.heads, case.dim)
    skip = torch.full((len(own),), prefix_keys, dtype=torch.int32, device=DEVICE)
    skip[0] = 0
    prefix = room(parts, query)
    for row in range(1, len(own)):
        prefix.output[0, row], prefix.lse[0, row] = case.attend(query[row], row, 0, prefix_keys, SCALE)
    prefix.output[1:, 1:], prefix.lse[1:, 1:] = 0.0, -math.inf
    output = run(case, query, window, splits, skip, prefix)
    torch.testing.assert_close(output, expected(case, query, window), atol=1e-5, rtol=1e-5)


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


def test_a_partial_result_may_lie_where_the_output_goes() -> None:
    case = PagedCase(0, [40, 35], 16, 1, 2, 16, DEVICE, num_shared=2)
    query = case.normal(2, case.heads, case.dim)
    for splits in (1, 2):
        output = torch.empty_like(query)
        lse = torch.empty(1, 2, case.heads, device=DEVICE)
        for row in range(2):
            output[row], lse[0, row] = case.attend(query[row], row, 0, 32, SCALE)
        skip = torch.full((2,), 32, dtype=torch.int32, device=DEVICE)
        run(case, query, splits=splits, skip=skip, prefix=Partial(output[None], lse), output=output)
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


def test_merge() -> None:
    generator = torch.Generator().manual_seed(0)
    outputs, lse = torch.randn((3, 5, 2, 20), generator=generator), 9 * torch.randn((3, 5, 2), generator=generator)
    lse[0, 0] = -math.inf
    merged = torch.full((5, 2, 20), 7.0, device=DEVICE)
    weights = (lse * math.log(2)).softmax(0)
    expected = (outputs * weights[..., None]).sum(0)
    lse[0, 3:, 1] = math.inf
    expected[3:, 1] = 7.0  # already there
    merge(Partial(outputs.to(DEVICE), lse.to(DEVICE)), merged)
    torch.testing.assert_close(merged.cpu(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("num_rows", "num_parts"), [(1, 20), (3, 8), (MANY_ROWS + 2, 3)])
def test_merge_of_few_rows_reads_parts_together_and_of_many_in_turn(num_rows: int, num_parts: int) -> None:
    torch.manual_seed(num_parts)
    outputs, lse = torch.randn(num_parts, num_rows, 2, 16), torch.randn(num_parts, num_rows, 2)
    lse[num_parts // 2 :, 0] = -math.inf
    outputs[num_parts // 2 :, 0] = torch.nan  # of no keys, and so never written
    weights = (lse * math.log(2)).softmax(0)[..., None]
    expected = (outputs.nan_to_num() * weights).sum(0)
    merged = torch.empty(num_rows, 2, 16, device=DEVICE)
    merge(Partial(outputs.to(DEVICE), lse.to(DEVICE)), merged)
    torch.testing.assert_close(merged.cpu(), expected, atol=1e-5, rtol=1e-5)


def test_splits_fill_the_chip_and_no_more() -> None:
    assert choose_splits(96, 96 * 8192, 8192, 32, 64, 8, 132).count == 1
    assert choose_splits(8000, 8000, 1, 32, 64, 8, 132) == Splits(32, 128)
    assert choose_splits(300, 300, 1, 32, 64, 8, 132).count == 3
    assert choose_splits(1200, 1200 * 64, 64, 32, 64, 8, 132) == Splits(
        3, 448
    )  # 1,536 programs: as many as run at once
    assert choose_splits(8000, 8000 + 500 * 1000, 1001, 32, 64, 8, 132).count > 4  # a long row beside short ones
    assert choose_splits(0, 0, 1, 1, 64, 1, 1).count == 1


def test_memory_of_partial_results_is_bounded() -> None:
    splits = choose_splits(100_000, 100_000 + 2000 * 500, 2001, 32, 128, 8, 132)
    assert 1 < splits.count <= MOST_PARTIALS / (2001 * 32 * 128)


def test_rows_of_any_length_are_split_by_their_number() -> None:
    assert choose_graph_splits(1, 8, 132) == Splits(32, 64)
    assert choose_graph_splits(64, 8, 132) == Splits(16, 256)
    assert choose_graph_splits(512, 8, 132) == choose_graph_splits(8192, 8, 132) == Splits(4, 512)
    counts = [choose_graph_splits(num_rows, 8, 132).count for num_rows in range(1, 1000)]
    assert counts == sorted(counts, reverse=True)


def test_programs_without_keys_leave_nothing_behind() -> None:
    case = PagedCase(3, [5, 70, 33], 16, 2, 2, 16, DEVICE)
    query = case.normal(3, case.heads, case.dim)
    splits = room(4, query)
    output = run(case, query, partial=splits, least=32)
    torch.testing.assert_close(output, expected(case, query), atol=1e-5, rtol=1e-5)
    assert splits.output[1:, 0].isnan().all()  # never written, never read


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [8, 64, 128, 256])
@pytest.mark.parametrize("is_short", [True, False])
def test_configurations_fit(head_dim: int, dtype: torch.dtype, is_short: bool) -> None:
    config = decode_config(head_dim, dtype, is_short)
    assert config.block >= 16  # the smallest inner size of a matrix product
    assert (
        2 * config.num_stages * config.block * head_dim * dtype.itemsize <= 64 << 10
    )  # three programs a multiprocessor


@pytest.mark.parametrize("splits", [1, 3])
def test_rows_without_keys_are_left_alone(splits: int) -> None:
    """They fill up a batch: what their outputs are is somebody else's."""
    case = PagedCase(0, [40, 5, 33], 4, 2, 3, 16, DEVICE)
    query = case.normal(3, 6, 16)
    whole = run(case, query, splits=splits)
    case.contexts[1] = 0
    output = torch.full_like(query, 7.0)
    run(case, query, splits=splits, output=output)
    assert output[1].eq(7.0).all()
    assert torch.equal(output[[0, 2]], whole[[0, 2]])
