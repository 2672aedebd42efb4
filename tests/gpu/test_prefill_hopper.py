"""The kernel for tiles of queries on Hopper chips equals exact attention, whatever lies beyond a row's last key."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton")

from tests.cases.paged import PagedCase
from tests.unit.kernels.test_prefill import check_chunks, check_prefixes
from toka_async.kernels.prefill import PrefillConfig, list_hopper_configs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CUDA = torch.device("cuda")


def choose_config(case: PagedCase) -> PrefillConfig:
    is_e4m3 = case.keys.dtype != case.dtype
    configs = list_hopper_configs(case.dim, case.group, case.dtype, case.page_size, CUDA, is_e4m3)
    if not configs:
        pytest.skip("no Hopper chip, or another version of Triton")
    return configs[0]


def spoil_the_rest(case: PagedCase) -> None:
    """Makes no numbers of all keys and values that no row has."""
    kept = torch.zeros(case.keys.shape[0], case.page_size, dtype=torch.bool)
    for pages, length in zip(case.pages, case.lengths, strict=True):
        for i, page in enumerate(pages):
            kept[page, : length - i * case.page_size] = True
    for tensor in (case.keys, case.values):
        unused = ~kept[:, None, :, None].to(CUDA)
        if tensor.dtype == torch.float8_e4m3fn:
            tensor.view(torch.uint8).masked_fill_(unused, 0x7F)
        else:
            tensor.masked_fill_(unused, math.nan)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(("page_size", "group"), [(8, 1), (16, 4), (64, 7), (128, 8)])
@pytest.mark.parametrize("window", [0, 1, 100, 300])
@pytest.mark.parametrize("is_split", [False, True])
def test_chunks(dtype: torch.dtype, dim: int, page_size: int, group: int, window: int, is_split: bool) -> None:
    case = PagedCase(window, [700, 1, 65, 257, 128], page_size, 2, group, dim, CUDA, dtype)
    spoil_the_rest(case)
    check_chunks(case, window, choose_config(case), is_split=is_split)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 4, 7])
@pytest.mark.parametrize(("num_pages", "splits"), [(1, 1), (43, 1), (44, 3), (5, 8)])
def test_prefixes(dim: int, group: int, num_pages: int, splits: int) -> None:
    case = PagedCase(num_pages, [16 * num_pages + 1] * 4, 16, 2, group, dim, CUDA, torch.bfloat16)
    spoil_the_rest(case)
    check_prefixes(case, [300, 5, 64], num_pages, splits, choose_config(case))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("page_size", "group", "window"), [(8, 1, 0), (16, 4, 300), (64, 7, 0), (128, 8, 1)])
@pytest.mark.parametrize("is_split", [False, True])
def test_chunks_in_e4m3(dtype: torch.dtype, dim: int, page_size: int, group: int, window: int, is_split: bool) -> None:
    case = PagedCase(window, [700, 1, 65, 257, 128], page_size, 2, group, dim, CUDA, dtype, is_e4m3=True)
    spoil_the_rest(case)
    check_chunks(case, window, choose_config(case), is_split=is_split)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("num_pages", "splits"), [(43, 1), (44, 3)])
def test_prefixes_in_e4m3(dim: int, num_pages: int, splits: int) -> None:
    case = PagedCase(num_pages, [16 * num_pages + 1] * 4, 16, 2, 4, dim, CUDA, torch.bfloat16, is_e4m3=True)
    spoil_the_rest(case)
    check_prefixes(case, [300, 5, 64], num_pages, splits, choose_config(case))


@pytest.mark.parametrize(("dim", "is_e4m3"), [(64, False), (64, True), (128, True)])
def test_more_tiles_than_programs(dim: int, is_e4m3: bool) -> None:
    """Each program goes through several tiles of several lengths, and its ring of blocks goes on."""
    lengths = [2000 - 37 * i for i in range(24)]
    case = PagedCase(0, lengths, 16, 8, 4, dim, CUDA, torch.bfloat16, is_e4m3=is_e4m3)
    check_chunks(case, 0, choose_config(case))
