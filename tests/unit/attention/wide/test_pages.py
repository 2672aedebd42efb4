"""Which prefixes and chunks are widened, and where to; that attention over the copies is right: test_paged.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from toka_async.attention.wide.pages import WideLimits, WidePages
from toka_async.kernels.prefill import PrefillConfig

TILES = PrefillConfig(128, 128, num_warps=4, num_stages=2)


def make_pages(limits: WideLimits | None = None, kv_heads: int = 4, dim: int = 16) -> WidePages:
    stored = [torch.zeros(3, kv_heads, 16, dim).to(torch.float8_e4m3fn)]
    return WidePages(stored, stored, torch.bfloat16, 8 * kv_heads, TILES, limits)


def test_groups() -> None:
    """Of those with many rows, the first that fit, if all of these have many."""
    pages = make_pages(WideLimits(most_tokens=1600, least_reads=512, least_rows=1024))
    rows, lengths = np.array([63, 64, 1000, 512, 512]), np.array([1, 60, 30, 20, 10])
    assert pages.choose_groups(rows, lengths).tolist() == [False, True, True, False, False]
    assert pages.choose_groups(rows[2:], lengths[2:]).tolist() == [True, True, True]
    assert pages.choose_groups(rows[3:], lengths[3:]).tolist() == [True, True]
    assert pages.choose_groups(rows[4:], lengths[4:]).tolist() == [False]


@pytest.mark.parametrize("num_rows", [1024, 1025, 4096])
def test_their_tiles_have_room_in_graphs(num_rows: int) -> None:
    pages = make_pages()
    least = 512 // 8
    for rows in ([num_rows], [least + 1] * (num_rows // (least + 1)), [num_rows // 7] * 7):
        chosen = pages.choose_groups(np.array(rows), np.ones(len(rows), np.int64))
        tiles = sum(-(-count // pages.tile_queries) for count in np.array(rows)[chosen].tolist())
        assert tiles <= pages.count_tiles(num_rows)
    assert pages.count_tiles(1023) == 0


@pytest.mark.parametrize(
    ("lengths", "contexts", "is_worth"),
    [([2048], [2048], True), ([64], [64], False), ([64], [4096], False), ([64, 2048], [64, 2048], True)],
)
def test_chunks(lengths: list[int], contexts: list[int], is_worth: bool) -> None:
    queries, seen = np.array(lengths, np.int32), np.array(contexts, np.int32)
    assert make_pages().is_worth(queries, seen) == is_worth
    assert not make_pages(WideLimits(most_tokens=32)).is_worth(queries, seen)


def test_pages_lie_one_after_the_other() -> None:
    pages = make_pages()
    first, sources = pages.place(np.array([5, 2]), np.array([2, 3]))
    assert first.tolist() == [0, 2]
    assert sources.tolist() == [[5, 5], [5, 0], [5, 1], [2, 0], [2, 1], [2, 2]]


def test_memory_of_a_large_model() -> None:
    """Qwen3-30B-A3B: a thousandth of a GPU of 141 GiB."""
    pages = make_pages(kv_heads=4, dim=128)
    assert pages.keys.nbytes + pages.values.nbytes == 128 << 20
    assert pages.keys.dtype == torch.bfloat16
    many_heads = make_pages(kv_heads=32, dim=128)
    assert many_heads.keys.nbytes + many_heads.values.nbytes == 256 << 20


def test_kernels_run_without_work() -> None:
    pages = make_pages(WideLimits(most_tokens=0))
    pages.run_each_kernel()
    pages.run_each_kernel(torch.zeros(32, dtype=torch.bfloat16))
    assert not pages.keys.any()
