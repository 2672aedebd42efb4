"""Attention of rows with one query each over their pages, straight from the page table.

One program is a row, a KV head and a part of its keys; nothing is planned on the host. Rows may skip leading keys that
were attended elsewhere and start from that partial result (arXiv:2402.05099): one pass merges and attends. The results
of a row's parts are merged by their log-sum-exp (arXiv:2311.01282). Knows no groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from toka_async.kernels.decode_work import MOST_PARTS, DecodeWork, find_first
from toka_async.kernels.launches.pdl import can_follow, follow
from toka_async.kernels.launches.quick import launch_quickly
from toka_async.kernels.launches.sizes import divide_up, round_to_power
from toka_async.kernels.stored import choose_operand, to_operand

LOG2E = 1.4426950408889634
MERGED_HEADS = 4  # heads of a program of the merge
MERGED_AT_ONCE = 8  # parts that a program of the merge reads at once: it would mostly wait for one after the other


@dataclass(slots=True, frozen=True)
class DecodeConfig:
    """block: keys of one iteration."""

    block: int
    num_warps: int
    num_stages: int


@dataclass(slots=True, frozen=True)
class Partial:
    """Attention over parts of the keys: output [..., heads, dim], lse float32 [..., heads].

    lse is the base-2 logarithm of the sum of 2 ** (score * log2(e)); -inf for no keys.
    """

    output: Tensor
    lse: Tensor


def decode_config(head_dim: int, dtype: torch.dtype, is_short: bool = False, is_e4m3: bool = False) -> DecodeConfig:
    """Chooses blocks so that a program's accumulator, keys and values stay in the registers of few warps.

    dtype: of queries. is_short: rows read few keys, which would leave larger blocks partly empty. is_e4m3: blocks have
    half the bytes, so that one more of them is on its way.
    """
    if dtype == torch.float32:
        return DecodeConfig(block=16, num_warps=2, num_stages=2 if head_dim <= 256 else 1)
    if head_dim > 256:
        return DecodeConfig(block=16, num_warps=4, num_stages=2)
    if head_dim > 128:
        return DecodeConfig(block=32, num_warps=4, num_stages=2)
    if is_short:
        return DecodeConfig(block=32, num_warps=1, num_stages=3)
    return DecodeConfig(block=64, num_warps=2, num_stages=3 if is_e4m3 else 2)


# (programs of each row and KV head that would fill the chip, parts, least keys); the first entry within reach holds.
_PARTS = (
    (100.0, (32, 64)),
    (8.0, (16, 128)),
    (2.0, (16, 256)),
    (1.0, (8, 256)),
    (0.5, (8, 512)),
    (0.0, (4, 512)),
)


def choose_parts(num_rows: int, num_programs: int) -> tuple[int, int]:
    """Chooses into how many parts of how many keys at least to divide few rows of unknown lengths.

    num_programs: that run at once, for each KV head. Measured on an H200 with rows of uneven lengths, 30 to 4,500 keys,
    and with even ones: the fastest is about as many programs as the chip runs at once, and the least keys grow with the
    rows.
    """
    wanted = num_programs / num_rows  # programs of each row and head to fill the chip
    if num_rows == 1 and wanted >= MOST_PARTS:
        return _PARTS[0][1]
    return next(parts for least, parts in _PARTS if wanted >= least)


def decode_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    slots: Tensor,
    contexts: Tensor,
    output: Tensor,
    scale: float,
    config: DecodeConfig,
    work: DecodeWork,
    partial: Partial,
    window: int = 0,
    skip: Tensor | None = None,
    prefix: Partial | None = None,
    value_scale: float = 1.0,
    sinks: Tensor | None = None,
    soft_cap: float = 0.0,
) -> Any:
    """Writes attention of query [rows, heads, dim] to output; all tensors are contiguous. Returns the kernel.

    keys, values [pages, kv_heads, page_size, dim]; page_table int32 [slots, width]; slots int64, contexts int32 [rows],
    further entries are ignored. Rows of context 0 are left alone. work: which program reads which keys. partial
    [work.num_partials, ...]: float32 memory for partial results. window: a row sees its last `window` keys; 0: all of
    them. skip int32 [rows], prefix [p, rows, ...]: keys that a row leaves out, and attention over them (unread where
    skip is 0); a row whose window begins after its first key uses neither. prefix.output may be `output`, of one
    partial. value_scale: multiplies the result, of a prefix as well. sinks [heads]: logits that take
    part in the softmax of each row, without a value (arXiv:2309.17453); a prefix was attended without them. soft_cap: c
    of c * tanh(score / c), which limits scores but no sinks; 0: none.
    """
    num_rows, num_heads, dim = query.shape
    kv_heads, page_size = keys.shape[1:3]
    assert query.is_contiguous()
    assert output.is_contiguous()
    assert (skip is None) == (prefix is None)
    pdl = can_follow(query)
    factor, limit = fold_soft_cap(scale, soft_cap)
    kernel = _decode[len(work.items) * kv_heads,](
        query,
        keys,
        values,
        page_table,
        slots,
        contexts,
        work.items,
        skip,
        None if prefix is None else prefix.output,
        None if prefix is None else prefix.lse,
        output,
        partial.output,
        partial.lse,
        sinks,
        factor,
        1 / value_scale,
        page_table.stride(0),
        0 if prefix is None else prefix.lse.shape[0],
        num_rows,
        work.least,
        kv_heads=kv_heads,
        group=num_heads // kv_heads,
        group_pad=max(16, round_to_power(num_heads // kv_heads)),
        dim=dim,
        dim_pad=max(16, round_to_power(dim)),
        page_size=page_size,
        window=window,
        limit=limit,
        block=config.block,
        pdl=pdl,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        launch_pdl=pdl,
    )
    if len(work.merged):
        merge(partial, work.merged, 1, output)
    return kernel


def fold_soft_cap(scale: float, soft_cap: float) -> tuple[float, float]:
    """Returns the factor of products that kernels take, and the limit of `cap_scores`, both of base 2; 0: none."""
    return (2 * LOG2E * scale / soft_cap, soft_cap * LOG2E) if soft_cap else (scale * LOG2E, 0.0)


def merge(partial: Partial, merged: Tensor, stride: int, output: Tensor) -> None:
    """Merges partial results [n, heads, dim] of rows into output [rows, heads, dim].

    merged: int32 [m, 3]: a row, its first result, how many it has, at most MOST_PARTS, of which each is `stride` after
    the one before. A row stays as it is if it has fewer than two, if an lse is +inf, or if all are -inf (no keys).
    """
    (num_heads, dim), pdl = output.shape[1:], can_follow(output)
    _merge[len(merged), divide_up(num_heads, MERGED_HEADS)](
        partial.output,
        partial.lse,
        merged,
        output,
        stride,
        num_heads=num_heads,
        parts_pad=MOST_PARTS,
        heads=MERGED_HEADS,
        at_once=MERGED_AT_ONCE,
        dim=dim,
        dim_pad=round_to_power(dim),
        pdl=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


@triton.jit
def cap_scores(x, limit: tl.constexpr):
    """Computes limit * tanh(y) of x = 2 * log2(e) * y."""
    return limit - 2 * limit / (1 + tl.exp2(x))


@triton.jit
def load_sinks(sinks, head, mask):
    """Loads the heads' logits for base 2; -inf outside of the mask."""
    return tl.load(sinks + head, mask=mask, other=-float("inf")).to(tl.float32) * 1.4426950408889634


@launch_quickly
@triton.jit(
    do_not_specialize=["table_stride", "num_prefixes", "num_rows", "least"],
    do_not_specialize_on_alignment=["page_table", "slots", "contexts", "items", "skip"],
)
def _decode(
    query,
    keys,
    values,
    page_table,
    slots,
    contexts,
    items,
    skip,
    prefix_output,
    prefix_lse,
    output,
    parts,
    lse,
    sinks,
    scale,
    divisor,
    table_stride,
    num_prefixes,
    num_rows,
    least,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    group_pad: tl.constexpr,
    dim: tl.constexpr,
    dim_pad: tl.constexpr,
    page_size: tl.constexpr,
    window: tl.constexpr,
    limit: tl.constexpr,
    block: tl.constexpr,
    pdl: tl.constexpr,
):
    follow(pdl)
    num_heads: tl.constexpr = kv_heads * group
    number = tl.program_id(0)
    kv_head = number % kv_heads  # the heads of a page lie side by side
    item = (number // kv_heads).to(tl.int64)
    row = tl.load(items + item * 3).to(tl.int64)
    if row < 0:
        return
    part = tl.load(items + item * 3 + 1)
    num_parts = tl.load(items + item * 3 + 2)
    table = page_table + tl.load(slots + row) * table_stride
    length, first = find_first(contexts, skip, row, True, window)

    in_group = tl.arange(0, group_pad)
    column = tl.arange(0, dim_pad)
    is_head = in_group < group
    is_query = is_head[:, None] & (column < dim)[None, :]
    head = row * num_heads + kv_head * group + in_group
    in_parts = item * num_heads + kv_head * group + in_group
    if length == 0:  # the merge leaves a row out where it finds +inf
        tl.store(lse + in_parts, float("inf"), mask=is_head & (num_parts > 1))
        return
    place = head[:, None] * dim + column[None, :]
    operand: tl.constexpr = choose_operand(query.dtype.element_ty, keys.dtype.element_ty)
    queries = to_operand(tl.load(query + place, mask=is_query, other=0.0), operand)

    top = tl.full([group_pad], -float("inf"), tl.float32)  # largest score so far, base 2
    total = tl.zeros([group_pad], tl.float32)
    mixed = tl.zeros([group_pad, dim_pad], tl.float32)
    if sinks is not None:  # in the first part of a row's keys
        has_sink = is_head & (part == 0)
        top = load_sinks(sinks, kv_head * group + in_group, has_sink)
        total = tl.where(has_sink, 1.0, 0.0)
    if skip is not None:
        taken = (first > 0) & (part == 0)
        for prefix_number in range(num_prefixes):
            before = tl.cast(prefix_number, tl.int64) * num_rows * num_heads
            one_lse = tl.load(prefix_lse + before + head, mask=is_head & taken, other=-float("inf"))
            one = tl.load(prefix_output + before * dim + place, mask=is_query & taken, other=0.0).to(tl.float32)
            new_top = tl.maximum(top, one_lse)
            base = tl.where(new_top == -float("inf"), 0.0, new_top)
            old_weight, weight = tl.exp2(top - base), tl.exp2(one_lse - base)
            mixed = mixed * old_weight[:, None] + one * weight[:, None]
            total = total * old_weight + weight
            top = new_top
    if window > 0:
        first = tl.maximum(first, length - window)
    share = tl.cdiv(tl.maximum(tl.cdiv(length - first, num_parts), least), block) * block
    alone = first + share >= length  # no other program has keys of this row
    first = first + part * share
    last = tl.minimum(first + share, length)
    if (first >= last) & (part > 0):  # no keys are left: the weight in the merge is 0
        tl.store(lse + in_parts, top, mask=is_head)
        return

    for start in range(first, last, block):
        position = start + tl.arange(0, block)
        is_key = position < last
        page = tl.load(table + position // page_size, mask=is_key, other=0).to(tl.int64)
        offset = ((page * kv_heads + kv_head) * page_size + position % page_size) * dim
        inside = is_key[:, None] & (column < dim)[None, :]
        key = tl.load(keys + offset[:, None] + column[None, :], mask=inside, other=0.0).to(operand)
        scores = tl.dot(queries, tl.trans(key), input_precision="ieee") * scale
        if limit > 0:
            scores = cap_scores(scores, limit)
        scores = tl.where(is_key[None, :], scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp2(top - new_top)
        weights = tl.exp2(scores - new_top[:, None])
        value = tl.load(values + offset[:, None] + column[None, :], mask=inside, other=0.0).to(operand)
        total = total * shrink + tl.sum(weights, 1)
        mixed = tl.dot(weights.to(operand), value, mixed * shrink[:, None], input_precision="ieee")
        top = new_top

    total = tl.where(total > 0.0, total, 1.0)  # no keys give 0 and a log-sum-exp of -inf
    result = mixed / (total * divisor)[:, None]
    part_lse = tl.where(alone, float("inf"), top + tl.log2(total))
    tl.store(lse + in_parts, part_lse, mask=is_head & (num_parts > 1))
    if alone:
        tl.store(output + place, result.to(output.dtype.element_ty), mask=is_query)
    else:
        tl.store(parts + in_parts[:, None] * dim + column[None, :], result, mask=is_query)


@launch_quickly
@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=["merged"])
def _merge(
    parts,
    lse,
    merged,
    output,
    stride,
    num_heads: tl.constexpr,
    parts_pad: tl.constexpr,
    heads: tl.constexpr,
    at_once: tl.constexpr,
    dim: tl.constexpr,
    dim_pad: tl.constexpr,
    pdl: tl.constexpr,
):
    """One program merges `heads` heads of a row."""
    follow(pdl)
    entry = merged + tl.program_id(0) * 3
    count = tl.load(entry + 2)
    if count < 2:
        return
    row = tl.load(entry).to(tl.int64)
    first = tl.load(entry + 1).to(tl.int64)
    head = tl.program_id(1) * heads + tl.arange(0, heads)
    number = tl.arange(0, parts_pad)
    inside = (head < num_heads)[:, None] & (number < count)[None, :]
    place = (first + number[None, :] * stride) * num_heads + head[:, None]
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
    for start in range(0, count, at_once):
        some = start + tl.arange(0, at_once)
        is_part = some[None, :, None] == number[None, None, :]
        shares = tl.sum(tl.where(is_part, weights[:, None, :], 0.0), 2)  # [heads, at_once]
        places = ((first + some[None, :] * stride) * num_heads + head[:, None])[:, :, None] * dim
        of_parts = (shares > 0.0)[:, :, None] & is_column[:, None, :]
        values = tl.load(parts + places + column[None, None, :], mask=of_parts, other=0.0)
        mixed += tl.sum(values.to(tl.float32) * shares[:, :, None], 1)
    total = tl.sum(weights, 1)
    result = mixed / tl.where(total > 0.0, total, 1.0)[:, None]
    at = (row * num_heads + head)[:, None] * dim + column[None, :]
    tl.store(output + at, result.to(output.dtype.element_ty), mask=is_head[:, None] & is_column)
