"""Divides the keys of decoding rows among programs, on the device: nothing is planned on the host.

Rows with the most keys start first, and no program gets much more than an equal part of all keys (list scheduling,
Graham 1969). So a captured graph suits rows of any lengths. Knows lengths only, neither keys nor heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from toka_async.kernels.launches.quick import launch_quickly
from toka_async.kernels.launches.sizes import divide_up

MOST_PARTS = 32  # of a row; the merge reads the weights of so many at once
_UNEVEN = 1.3  # times the mean that the longest row must have for smaller parts to pay
_FEW_ROWS = 16  # with more rows, only larger parts pay
_LEAST_KEYS = 128  # of a part; merging smaller ones costs more than they save
_UNIT = 64  # keys: parts are multiples of the largest block
_BLOCK_ROWS = 16  # rows of a program that divides


@dataclass(slots=True, frozen=True)
class DecodeWork:
    """Which program reads which keys.

    items: int32 [n, 3]: a row, which part of its keys, of how many; -1: no row. merged: int32 [m, 3]: a row, its first
    item, its parts; rows of one part need not be there. least: the fewest keys of a part but the last. num_partials:
    the leading items that may be of rows with several parts.
    """

    items: Tensor
    merged: Tensor
    least: int
    num_partials: int


def needs_parts(longest: int, total: int, num_rows: int, num_programs: int) -> bool:
    """Tells whether a row of the longest length, of `total` keys in all rows, is worth several parts."""
    return longest > max(_choose_least(num_rows), total / (2 * num_programs))


def divide_keys(
    contexts: Tensor, num_rows: int, skip: Tensor | None, window: int, num_programs: int, is_split: bool = True
) -> DecodeWork:
    """Divides the keys of the first rows of contexts, int32, by one launch. May be captured in a graph.

    Rows without keys have no part. skip, window: see `decode_attention`. num_programs: that run at once, for each KV
    head. is_split: rows may have several parts.
    """
    assert num_rows > 0
    # Parts have at least half of an equal part of the keys, so there are at most two for each program beside the rows'
    # last, and rows of several parts have at most twice as many items.
    more = 2 * num_programs if is_split else 0
    num_items = min(num_rows + more, num_rows * (MOST_PARTS if is_split else 1))
    num_partials = min(2 * more, num_items)
    items = torch.empty((num_items, 3), dtype=torch.int32, device=contexts.device)
    merged = torch.empty((min(num_partials // 2, num_rows), 3), dtype=torch.int32, device=contexts.device)
    _divide[divide_up(num_rows, _BLOCK_ROWS),](
        contexts,
        skip,
        items,
        merged,
        num_rows,
        num_items,
        len(merged),
        num_programs,
        _choose_least(num_rows),
        MOST_PARTS if is_split else 1,
        window=window,
        unit=_UNIT,
        uneven=round(_UNEVEN * 10),
        block_rows=_BLOCK_ROWS,
        block=256,
        num_warps=4,
    )
    return DecodeWork(items, merged, 0, num_partials)


def divide_alike(num_rows: int, parts: int, least: int, device: torch.device) -> DecodeWork:
    """Divides each row's keys into the same number of parts, of which some may stay empty."""
    item = torch.arange(num_rows * parts, dtype=torch.int32, device=device)
    items = torch.stack((item // parts, item % parts, torch.full_like(item, parts)), dim=1)
    merged = torch.stack((items[::parts, 0], item[::parts], items[::parts, 2]), dim=1)
    return DecodeWork(items, merged, least, len(item))


def _choose_least(num_rows: int) -> int:
    return _LEAST_KEYS if num_rows <= _FEW_ROWS else 2 * _LEAST_KEYS


@triton.jit
def find_first(contexts, skip, row, is_row, window: tl.constexpr):
    """Finds how many keys rows have, and the first that they read themselves."""
    length = tl.load(contexts + row, mask=is_row, other=0)
    first = length * 0
    if skip is not None:
        first = tl.load(skip + row, mask=is_row, other=0)
        if window > 0:
            first = tl.where(length > window, 0, first)
    return length, first


@triton.jit
def _count_keys(contexts, skip, row, num_rows, window: tl.constexpr):
    """Counts the keys that rows read themselves; -1 past the last row."""
    length, first = find_first(contexts, skip, row, row < num_rows, window)
    if window > 0:
        first = tl.maximum(first, length - window)
    return tl.where(row < num_rows, length - first, -1)


@triton.jit
def _count_parts(keys, share, most):
    return tl.where(keys > 0, tl.minimum(tl.cdiv(keys, share), most), 0)


@launch_quickly
@triton.jit(
    do_not_specialize=["num_rows", "num_items", "num_merged", "num_programs", "smallest", "most"],
    do_not_specialize_on_alignment=["contexts", "skip"],
)
def _divide(
    contexts,
    skip,
    items,
    merged,
    num_rows,
    num_items,
    num_merged,
    num_programs,
    smallest,
    most,
    window: tl.constexpr,
    unit: tl.constexpr,
    uneven: tl.constexpr,
    block_rows: tl.constexpr,
    block: tl.constexpr,
):
    """One program places `block_rows` rows: after all longer ones, and after those of the same length before them."""
    sums = tl.zeros([block], tl.int64)
    tops = tl.zeros([block], tl.int32)
    for start in range(0, num_rows, block):
        keys = tl.maximum(_count_keys(contexts, skip, start + tl.arange(0, block), num_rows, window), 0)
        sums += keys
        tops = tl.maximum(tops, keys)
    total, longest = tl.sum(sums, 0), tl.max(tops, 0).to(tl.int64)
    # A program that goes on alone when all others are done wastes the chip: parts are smaller where rows differ.
    shares = tl.where(longest * num_rows * 10 <= total * uneven, num_programs, 2 * num_programs)
    share = (tl.cdiv(tl.maximum(tl.cdiv(total, shares), smallest), unit) * unit).to(tl.int32)

    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    keys = _count_keys(contexts, skip, row, num_rows, window)
    parts = _count_parts(keys, share, most)
    first = tl.zeros([block_rows], tl.int32)
    place = tl.zeros([block_rows], tl.int32)
    num_used, num_split = total.to(tl.int32) * 0, total.to(tl.int32) * 0
    for start in range(0, num_rows, block):
        other = start + tl.arange(0, block)
        other_keys = _count_keys(contexts, skip, other, num_rows, window)
        other_parts = _count_parts(other_keys, share, most)
        is_tie = (other_keys[None, :] == keys[:, None]) & (other[None, :] < row[:, None])
        is_before = (other_keys[None, :] > keys[:, None]) | is_tie
        first += tl.sum(tl.where(is_before, other_parts[None, :], 0), 1)
        place += tl.sum(is_before.to(tl.int32), 1)
        num_used += tl.sum(other_parts, 0)
        num_split += tl.sum((other_parts > 1).to(tl.int32), 0)

    for part in range(tl.max(parts, 0)):
        at = (first + part) * 3
        tl.store(items + at, row, mask=part < parts)
        tl.store(items + at + 1, part, mask=part < parts)
        tl.store(items + at + 2, parts, mask=part < parts)
    is_split = parts > 1
    tl.store(merged + place * 3, row, mask=is_split)
    tl.store(merged + place * 3 + 1, first, mask=is_split)
    tl.store(merged + place * 3 + 2, parts, mask=is_split)
    if tl.program_id(0) == 0:
        for start in range(num_used, num_items, block):
            at = start + tl.arange(0, block)
            tl.store(items + at * 3, -1, mask=at < num_items)
        for start in range(num_split, num_merged, block):
            at = start + tl.arange(0, block)
            tl.store(merged + at * 3 + 2, 0, mask=at < num_merged)
