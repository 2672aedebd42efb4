"""Attention over a cache in E4M3 equals exact attention, read as it is or from wide pages by the kernel for Hopper."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests.cases.attention import E4M3_SCALED, AttentionCase, make_case
from toka_async.attention.triton import TritonChunks, TritonDecode
from toka_async.attention.wide.pages import WideLimits, WidePages
from toka_async.kernels.prefill import list_hopper_configs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CUDA = torch.device("cuda")
BOUND = 4e-2  # of the largest number


def make_wide_pages(case: AttentionCase) -> WidePages:
    cache = case.cache
    group_size = case.num_heads // cache.num_kv_heads
    configs = list_hopper_configs(cache.head_dim, group_size, cache.dtype, cache.page_size, CUDA)
    if not configs:
        pytest.skip("no Hopper chip, or another version of Triton")
    limits = WideLimits(least_rows=300)
    return WidePages(cache.keys, cache.values, cache.dtype, case.num_heads, configs[0], limits)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("dim", "page_size", "group_size"), [(64, 16, 4), (128, 16, 8), (128, 64, 7), (64, 128, 1), (256, 16, 8)]
)
def test_chunks(dtype: torch.dtype, dim: int, page_size: int, group_size: int) -> None:
    chunks = [(0, 1200), (900, 1100), (4000, 3)]
    case = make_case(
        1, page_size, 2, group_size, dim, (), (), chunks, dtype, CUDA, E4M3_SCALED, has_sinks=group_size > 4
    )
    wide = make_wide_pages(case)
    wide.keys.fill_(torch.nan)
    wide.values.fill_(torch.nan)
    part = TritonChunks(case.cache, case.num_heads, wide=wide)
    output = torch.full_like(case.query, torch.nan)
    part.plan(case.batch, 0)
    assert part.step is not None
    assert (part.step.sources is not None) == (group_size > 1)
    part.run(0, case.query, output, case.sinks)
    expected = case.expected()
    assert (output.float() - expected).abs().max() < BOUND * expected.abs().max()


@torch.inference_mode()
@pytest.mark.parametrize("is_graph", [False, True])
@pytest.mark.parametrize(("dim", "group_size"), [(64, 4), (128, 8), (256, 8)])
def test_prefixes(dim: int, group_size: int, is_graph: bool) -> None:
    """Prefixes of many rows are widened, beside those of few rows and rows that share none."""
    groups = [(200, 44), (5, 9), (140, 3)]
    case = make_case(
        2, 16, 2, group_size, dim, groups, [100] * 3, dtype=torch.bfloat16, device=CUDA, stored=E4M3_SCALED
    )
    batch = case.batch
    part = TritonDecode(case.cache, case.num_heads, wide=make_wide_pages(case))
    if is_graph:
        part.plan_graph(batch, grouped=True, window=0)
        part.set_groups(batch.groups)
    else:
        part.plan(batch, batch.groups, 0)
    assert part.shared is not None
    assert part.shared.num_programs
    assert part.shared.num_wide
    output = torch.full_like(case.query, torch.nan)
    part.run(0, case.query, output)
    expected = case.expected()
    assert (output.float() - expected).abs().max() < BOUND * expected.abs().max()
