"""Attention of rows with one query each over their pages, straight from the page table.

One program is a row, a KV head and a split of its keys; nothing is planned on the host. Rows may skip leading keys that
were attended elsewhere and start from that partial result (arXiv:2402.05099): one pass merges and attends. The results
of splits are merged by their log-sum-exp (arXiv:2311.01282). Knows no groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from toka_async.kernels.pdl import can_follow, follow

LOG2E = 1.4426950408889634
MOST_SPLITS = 32
PROGRAMS_PER_SM = 12  # about as many run at once
SMALLEST_SPLIT = 128  # keys; merging smaller splits costs more than they save
FEW_ROWS = 16  # with more rows, only larger splits pay
MERGED_HEADS = 4  # heads of a program of the merge
MERGED_AT_ONCE = 8  # parts that a program reads at once if too few programs run to hide each other's waits
MANY_ROWS = 128
MOST_PARTIALS = 1 << 26  # numbers in all partial results of a step


@dataclass(slots=True, frozen=True)
class DecodeConfig:
    """block: keys of one iteration."""

    block: int
    num_warps: int
    num_stages: int


@dataclass(slots=True, frozen=True)
class Partial:
    """Attention over p parts of the keys: output [p, rows, heads, dim], lse float32 [p, rows, heads].

    lse is the base-2 logarithm of the sum of 2 ** (score * log2(e)); -inf for no keys.
    """

    output: Tensor
    lse: Tensor


def decode_config(head_dim: int, dtype: torch.dtype, is_short: bool = False) -> DecodeConfig:
    """Chooses blocks so that a program's accumulator, keys and values stay in the registers of few warps.

    is_short: rows read few keys, which would leave larger blocks partly empty.
    """
    if dtype == torch.float32:
        return DecodeConfig(block=16, num_warps=2, num_stages=2)
    if head_dim > 128:
        return DecodeConfig(block=32, num_warps=4, num_stages=2)
    if is_short:
        return DecodeConfig(block=32, num_warps=1, num_stages=3)
    return DecodeConfig(block=64, num_warps=2, num_stages=2)


@dataclass(slots=True, frozen=True)
class Splits:
    """The most programs that share a row's keys, and the fewest keys that justify another program."""

    count: int
    least: int


# (programs of each row and KV head that would fill the chip, splits); the first entry within reach holds.
_SPLITS = (
    (100.0, Splits(32, 64)),
    (8.0, Splits(16, 128)),
    (2.0, Splits(16, 256)),
    (1.0, Splits(8, 256)),
    (0.5, Splits(8, 512)),
    (0.0, Splits(4, 512)),
)


def choose_graph_splits(num_rows: int, kv_heads: int, num_sms: int) -> Splits:
    """Chooses splits for rows of unknown lengths, in any order.

    Measured on an H200 with rows of uneven lengths, 30 to 4,500 keys, and with even ones: the fastest of some dozens of
    splits is about as many programs as the chip runs at once, and the least keys grow with the rows.
    """
    wanted = PROGRAMS_PER_SM * num_sms / max(1, num_rows * kv_heads)  # programs of each row and head to fill the chip
    return next(splits for least, splits in _SPLITS if wanted >= least)


def choose_splits(
    longest: int, total: int, num_rows: int, num_heads: int, dim: int, kv_heads: int, num_sms: int
) -> Splits:
    """Chooses splits for rows of `total` keys together, the longest of which start first.

    A program that goes on alone when all others are done wastes the chip: none gets more than half of an equal part of
    the work, or all of it where rows are alike.
    """
    equal = total * kv_heads / (PROGRAMS_PER_SM * num_sms)
    if longest <= equal / 2:
        return Splits(1, longest)
    is_even = longest * num_rows <= 1.3 * total
    smallest = SMALLEST_SPLIT if num_rows <= FEW_ROWS else 2 * SMALLEST_SPLIT
    least = triton.cdiv(max(smallest, int(equal if is_even else equal / 2)), 64) * 64
    most = MOST_SPLITS if num_rows == 1 else MOST_SPLITS // 2
    most = min(most, max(1, MOST_PARTIALS // (num_rows * num_heads * dim)))
    return Splits(min(triton.cdiv(longest, least), most), least)


def decode_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    slots: Tensor,
    contexts: Tensor,
    order: Tensor,
    output: Tensor,
    scale: float,
    window: int = 0,
    skip: Tensor | None = None,
    prefix: Partial | None = None,
    splits: Partial | None = None,
    least: int = SMALLEST_SPLIT,
    config: DecodeConfig | None = None,
) -> None:
    """Writes attention of query [rows, heads, dim] to output; all tensors are contiguous.

    keys, values [pages, kv_heads, page_size, dim]; page_table int32 [slots, width]; slots int64, contexts int32 [rows],
    further entries are ignored. order int32 [rows]: which rows start first, best those with the most keys. window: a
    row sees its last `window` keys; 0: all of them. skip int32 [rows], prefix: keys that a row leaves out, and
    attention over them (unread where skip is 0); a row whose window begins after its first key uses neither.
    prefix.output may be `output`, of one partial. splits: float32 memory for partial results, one for each program that
    shares a row's keys; None: one does all. least: the fewest keys of each of these programs but the last.
    """
    num_rows, num_heads, dim = query.shape
    kv_heads, page_size = keys.shape[1:3]
    assert query.is_contiguous()
    assert output.is_contiguous()
    assert (skip is None) == (prefix is None)
    if not num_rows:
        return
    config, pdl = config or decode_config(dim, keys.dtype), can_follow(query)
    shares = 1 if splits is None else splits.lse.shape[0]
    _decode[num_rows * shares * kv_heads,](
        query,
        keys,
        values,
        page_table,
        slots,
        contexts,
        order,
        skip,
        None if prefix is None else prefix.output,
        None if prefix is None else prefix.lse,
        output,
        None if splits is None else splits.output,
        None if splits is None else splits.lse,
        scale * LOG2E,
        page_table.stride(0),
        0 if prefix is None else prefix.lse.shape[0],
        num_rows,
        shares,
        least,
        kv_heads=kv_heads,
        group=num_heads // kv_heads,
        group_pad=max(16, triton.next_power_of_2(num_heads // kv_heads)),
        dim=dim,
        dim_pad=max(16, triton.next_power_of_2(dim)),
        page_size=page_size,
        window=window,
        has_prefix=prefix is not None,
        is_split=splits is not None,
        block=config.block,
        pdl=pdl,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        launch_pdl=pdl,
    )
    if splits is not None:
        merge(splits, output)


def merge(parts: Partial, output: Tensor) -> None:
    """Merges partial results of queries [rows, heads] into output [rows, heads, dim].

    The output stays as it is where an lse is +inf, or where all are -inf (no keys).
    """
    num_parts, num_rows, num_heads = parts.lse.shape
    assert num_parts <= MOST_SPLITS
    dim, pdl = output.shape[-1], can_follow(output)
    _merge[triton.cdiv(num_rows * num_heads, MERGED_HEADS),](
        parts.output,
        parts.lse,
        output,
        num_parts,
        num_rows * num_heads,
        parts_pad=MOST_SPLITS,
        heads=MERGED_HEADS,
        at_once=1 if num_rows > MANY_ROWS else MERGED_AT_ONCE,
        dim=dim,
        dim_pad=triton.next_power_of_2(dim),
        pdl=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


@triton.jit(
    do_not_specialize=["table_stride", "num_prefixes", "num_rows", "num_splits", "least"],
    do_not_specialize_on_alignment=["page_table", "slots", "contexts", "order", "skip"],
)
def _decode(
    query,
    keys,
    values,
    page_table,
    slots,
    contexts,
    order,
    skip,
    prefix_output,
    prefix_lse,
    output,
    parts,
    lse,
    scale,
    table_stride,
    num_prefixes,
    num_rows,
    num_splits,
    least,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    group_pad: tl.constexpr,
    dim: tl.constexpr,
    dim_pad: tl.constexpr,
    page_size: tl.constexpr,
    window: tl.constexpr,
    has_prefix: tl.constexpr,
    is_split: tl.constexpr,
    block: tl.constexpr,
    pdl: tl.constexpr,
):
    follow(pdl)
    num_heads: tl.constexpr = kv_heads * group
    number = tl.program_id(0)
    kv_head = number % kv_heads  # the heads of a page lie side by side
    split = number // kv_heads % num_splits
    row = tl.load(order + number // kv_heads // num_splits).to(tl.int64)
    table = page_table + tl.load(slots + row) * table_stride
    length = tl.load(contexts + row)

    in_group = tl.arange(0, group_pad)
    column = tl.arange(0, dim_pad)
    is_head = in_group < group
    is_query = is_head[:, None] & (column < dim)[None, :]
    head = row * num_heads + kv_head * group + in_group
    place = head[:, None] * dim + column[None, :]
    queries = tl.load(query + place, mask=is_query, other=0.0)

    top = tl.full([group_pad], -float("inf"), tl.float32)  # largest score so far, base 2
    total = tl.zeros([group_pad], tl.float32)
    mixed = tl.zeros([group_pad, dim_pad], tl.float32)
    first = length * 0
    if has_prefix:
        first = tl.load(skip + row)
        if window > 0:
            first = tl.where(length > window, 0, first)
        taken = (first > 0) & (split == 0)
        for part_number in range(num_prefixes):
            before = tl.cast(part_number, tl.int64) * num_rows * num_heads
            part_lse = tl.load(prefix_lse + before + head, mask=is_head & taken, other=-float("inf"))
            part = tl.load(prefix_output + before * dim + place, mask=is_query & taken, other=0.0).to(tl.float32)
            new_top = tl.maximum(top, part_lse)
            base = tl.where(new_top == -float("inf"), 0.0, new_top)
            old_weight, weight = tl.exp2(top - base), tl.exp2(part_lse - base)
            mixed = mixed * old_weight[:, None] + part * weight[:, None]
            total = total * old_weight + weight
            top = new_top
    if window > 0:
        first = tl.maximum(first, length - window)
    last = length
    if is_split:
        share = tl.cdiv(tl.maximum(tl.cdiv(length - first, num_splits), least), block) * block
        alone = first + share >= length  # no other program has keys of this row
        first = first + split * share
        last = tl.minimum(first + share, length)
        if (first >= last) & (split > 0):  # no keys are left: the weight in the merge is 0
            before = split.to(tl.int64) * num_rows * num_heads
            tl.store(lse + before + head, top, mask=is_head)
            return

    for start in range(first, last, block):
        position = start + tl.arange(0, block)
        is_key = position < last
        page = tl.load(table + position // page_size, mask=is_key, other=0).to(tl.int64)
        offset = ((page * kv_heads + kv_head) * page_size + position % page_size) * dim
        inside = is_key[:, None] & (column < dim)[None, :]
        key = tl.load(keys + offset[:, None] + column[None, :], mask=inside, other=0.0)
        scores = tl.dot(queries, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(is_key[None, :], scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp2(top - new_top)
        weights = tl.exp2(scores - new_top[:, None])
        value = tl.load(values + offset[:, None] + column[None, :], mask=inside, other=0.0)
        total = total * shrink + tl.sum(weights, 1)
        mixed = tl.dot(weights.to(value.dtype), value, mixed * shrink[:, None], input_precision="ieee")
        top = new_top

    total = tl.where(total > 0.0, total, 1.0)  # no keys give 0 and a log-sum-exp of -inf
    result = mixed / total[:, None]
    if is_split:
        before = split.to(tl.int64) * num_rows * num_heads
        tl.store(lse + before + head, tl.where(alone, float("inf"), top + tl.log2(total)), mask=is_head)
        if alone:
            tl.store(output + place, result.to(output.dtype.element_ty), mask=is_query)
        else:
            tl.store(parts + before * dim + place, result, mask=is_query)
    else:
        tl.store(output + place, result.to(output.dtype.element_ty), mask=is_query)


@triton.jit(do_not_specialize=["num_parts", "num_heads"])
def _merge(
    parts,
    lse,
    output,
    num_parts,
    num_heads,
    parts_pad: tl.constexpr,
    heads: tl.constexpr,
    at_once: tl.constexpr,
    dim: tl.constexpr,
    dim_pad: tl.constexpr,
    pdl: tl.constexpr,
):
    """One program merges `heads` of all rows' heads. Most rows have few parts that are not empty; only those are read.

    Few programs would mostly wait for memory, so each reads `at_once` parts together.
    """
    follow(pdl)
    head = tl.program_id(0).to(tl.int64) * heads + tl.arange(0, heads)
    number = tl.arange(0, parts_pad)
    place = number[None, :] * num_heads + head[:, None]
    inside = (head < num_heads)[:, None] & (number < num_parts)[None, :]
    part_lse = tl.load(lse + place, mask=inside, other=-float("inf"))
    top = tl.max(part_lse, 1)
    is_head = (head < num_heads) & (top < float("inf"))  # +inf: a program has written the output itself
    top = tl.where((top > -float("inf")) & is_head, top, 0.0)
    weights = tl.where(is_head[:, None], tl.exp2(part_lse - top[:, None]), 0.0)
    count = tl.max(tl.max(tl.where(weights > 0.0, number[None, :] + 1, 0), 1), 0)
    if count == 0:
        return
    column = tl.arange(0, dim_pad)
    is_column = (column < dim)[None, :]
    mixed = tl.zeros([heads, dim_pad], tl.float32)
    if at_once == 1:
        for part in range(count):
            weight = tl.sum(tl.where(number[None, :] == part, weights, 0.0), 1)
            at = (part * num_heads + head)[:, None] * dim + column[None, :]
            value = tl.load(parts + at, mask=(weight > 0.0)[:, None] & is_column, other=0.0).to(tl.float32)
            mixed += value * weight[:, None]
    else:
        for start in range(0, count, at_once):
            some = start + tl.arange(0, at_once)
            is_part = some[None, :, None] == number[None, None, :]
            shares = tl.sum(tl.where(is_part, weights[:, None, :], 0.0), 2)  # [heads, at_once]
            places = (some[None, :] * num_heads + head[:, None])[:, :, None] * dim + column[None, None, :]
            values = tl.load(parts + places, mask=(shares > 0.0)[:, :, None] & is_column[:, None, :], other=0.0)
            mixed += tl.sum(values.to(tl.float32) * shares[:, :, None], 1)
    total = tl.sum(weights, 1)
    result = mixed / tl.where(total > 0.0, total, 1.0)[:, None]
    at = head[:, None] * dim + column[None, :]
    tl.store(output + at, result.to(output.dtype.element_ty), mask=is_head[:, None] & is_column)
