"""Casts between what the model computes with and what the cache stores: the same numbers, or E4M3 (arXiv:2209.05433).

A stored number times its scale is the key or value. Kernels fold scales into the softmax's scale and the result.
A kernel that attends widens what it reads once for each tile of queries. Where a page has many tiles, one copy of it is
less work (`widen_pages`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from toka_async.kernels.launches.quick import launch_quickly
from toka_async.kernels.launches.sizes import round_to_power

_LARGEST = tl.constexpr(torch.finfo(torch.float8_e4m3fn).max)
_LARGEST_HALF = tl.constexpr(torch.finfo(torch.float16).max)
_BLOCK = 4096  # numbers of a page that are widened at a time


@triton.constexpr_function
def choose_operand(computed: tl.dtype, stored: tl.dtype) -> tl.dtype:
    """Chooses the dtype of products of queries with what is stored.

    E4M3 is widened to float16, which is exact: a GPU does it in a quarter of the instructions that bfloat16 takes.
    """
    return tl.float16 if stored == tl.float8e4nv and computed == tl.bfloat16 else computed


@triton.jit
def to_operand(x, dtype: tl.constexpr):
    """Casts queries to the dtype of products; what is beyond float16 saturates."""
    if x.dtype != dtype:
        x = tl.clamp(x.to(tl.float32), -_LARGEST_HALF, _LARGEST_HALF)
    return x.to(dtype)


@triton.jit
def to_stored(x, dtype: tl.constexpr, factor):
    """Casts keys or values to what is stored: to E4M3 times the factor, saturated."""
    if dtype == tl.float8e4nv:
        x = tl.clamp(x.to(tl.float32) * factor, -_LARGEST, _LARGEST)
    return x.to(dtype)


def widen_pages(
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    slots: Tensor,
    sources: Tensor,
    wide_keys: Tensor,
    wide_values: Tensor,
    num_programs: int,
) -> None:
    """Copies the pages that `sources` lists to the first pages of wide_keys and wide_values, of another dtype.

    Pages are [pages, kv_heads, page_size, dim]. page_table int32 [slots, width]; slots int64 [rows]. sources int32 [1 +
    n, 2]: first (n, -), then a row and which of its pages. num_programs: programs that go through them.
    """
    numbers = keys[0].numel()
    _widen[(num_programs,)](
        keys,
        values,
        page_table,
        slots,
        sources,
        wide_keys,
        wide_values,
        page_table.stride(0),
        numbers=numbers,
        block=min(_BLOCK, round_to_power(numbers)),
        num_warps=4,
    )


@launch_quickly
@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["page_table", "slots", "sources"],
)
def _widen(
    keys,
    values,
    page_table,
    slots,
    sources,
    wide_keys,
    wide_values,
    table_stride,
    numbers: tl.constexpr,
    block: tl.constexpr,
):
    for target in range(tl.program_id(0), tl.load(sources), tl.num_programs(0)):
        row = tl.load(sources + 2 * target + 2)
        number = tl.load(sources + 2 * target + 3)
        page = tl.load(page_table + tl.load(slots + row) * table_stride + number)
        source, wide = page.to(tl.int64) * numbers, tl.cast(target, tl.int64) * numbers
        for start in range(0, numbers, block):
            place = start + tl.arange(0, block)
            inside = place < numbers
            key = tl.load(keys + source + place, mask=inside)
            value = tl.load(values + source + place, mask=inside)
            tl.store(wide_keys + wide + place, key.to(wide_keys.dtype.element_ty), mask=inside)
            tl.store(wide_values + wide + place, value.to(wide_values.dtype.element_ty), mask=inside)
