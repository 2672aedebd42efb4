"""Copies pages that are stored in E4M3 to others in the dtype of queries, for many queries that read them.

A kernel that attends widens what it reads once for each tile of queries. Where a page has many tiles, one copy is less
work, and attention then runs as fast as over pages that were never narrow.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096  # numbers of a page at a time


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
    """Copies the pages that `sources` lists to the first pages of wide_keys and wide_values.

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
        block=min(_BLOCK, triton.next_power_of_2(numbers)),
        num_warps=4,
    )


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
