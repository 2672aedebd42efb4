"""Attention of tiles of queries on Hopper chips, with a task for each group of warps.

One warp copies blocks of keys and values into a ring in shared memory, page by page, by the chip's copy engine (TMA).
Each group of four warps computes 64 rows of the tile; while the product of a block's weights and values runs, the group
computes the weights of the next block (FlashAttention-3, arXiv:2407.08608). What is stored in E4M3 is copied to a ring
of its own, from which one more group widens it to float16. Arguments are those of `kernels.prefill`, which chooses
between the two kernels. Written in Gluon, whose interface changes with each version of Triton.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from toka_async.kernels.launches.quick import launch_quickly

PANEL = 128  # bytes of a key that one copy brings, at most
LEAST_BOX = 8  # keys that one copy brings at least
_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float8_e4m3fn: gl.float8e4nv}
_COPYING = gl.constexpr(24)  # registers of a thread that copies
_WIDENED = gl.constexpr(4096)  # numbers that a group widens at once, as many as its registers hold
_LARGEST_HALF = gl.constexpr(torch.finfo(torch.float16).max)


def can_copy(page_size: int, block_keys: int) -> bool:
    """Tells whether pages of so many tokens make up blocks, or are made up of them."""
    box = min(page_size, block_keys)
    return box % LEAST_BOX == 0 and box & (box - 1) == 0 and page_size % box == 0 and block_keys % box == 0


def attend_tiles(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    slots: Tensor,
    tiles: Tensor,
    output: Tensor,
    parts: Tensor | None,
    partial: Tensor | None,
    lse: Tensor,
    sinks: Tensor | None,
    scale: float,
    value_scale: float,
    num_tiles: int,
    window: int,
    splits: int,
    block_queries: int,
    block_keys: int,
    stages: int,
    registers: int,
    widening: int,
) -> Any:
    """Launches the kernel; see `prefill.attend_chunks`, and `prefill.attend_prefixes` where there are no parts.

    num_tiles: at most; a program for each multiprocessor goes through them. scale: of base 2. block_queries: rows of a
    tile. stages: blocks of the ring. registers: of a thread that computes. widening: of one that widens E4M3. Of parts,
    the first key is the first of a block, counted from the row's first token.
    """
    num_queries, num_heads, dim = query.shape
    kv_heads, page_size = keys.shape[1:3]
    box = min(page_size, block_keys)
    layout = _choose_layout(box, dim, keys.dtype)
    return _prefill_hopper[max(1, min(_count_sms(query.device), num_tiles * kv_heads * splits)),](
        query,
        _describe(keys, box, layout),
        _describe(values, box, layout),
        page_table,
        slots,
        tiles,
        output,
        parts,
        partial,
        lse,
        sinks,
        scale,
        value_scale,
        page_table.stride(0),
        num_queries,
        splits,
        kv_heads=kv_heads,
        group=num_heads // kv_heads,
        dim=dim,
        page_size=page_size,
        window=window,
        rows=block_queries,
        block_keys=block_keys,
        stages=stages,
        registers=registers,
        widening=widening,
        num_warps=4,
    )


@cache
def _count_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@cache
def _choose_layout(box: int, dim: int, dtype: torch.dtype) -> Any:
    """Chooses how a copy's keys lie in shared memory. Several of them are a block in the same layout."""
    return gl.NVMMASharedLayout.get_default_for([box, min(dim, PANEL // dtype.itemsize)], _TYPES[dtype])


def _describe(pages: Tensor, box: int, layout: Any) -> TensorDescriptor:
    """Describes pages [pages, kv_heads, page_size, dim] as rows of tokens of which `box` are copied at once."""
    dim = pages.shape[-1]
    columns = min(dim, PANEL // pages.element_size())
    return TensorDescriptor(pages, [pages.numel() // dim, dim], [dim, 1], [box, columns], layout)


@gluon.jit
def _find_work(turn):
    """Returns which piece of work this program does in a turn: the programs take pieces in order, then back again.

    Pieces of chunks with the most keys come first: in one order alone, the first program would get the most each time.
    """
    last = gl.num_programs(0) - 1
    return turn * (last + 1) + gl.program_id(0) + turn % 2 * (last - 2 * gl.program_id(0))


@gluon.jit
def _count_turns(num_work):
    """Returns how many turns this program has, of so many pieces of work in all."""
    whole = num_work // gl.num_programs(0)
    return whole + (_find_work(whole) < num_work).to(gl.int32)


@gluon.jit
def _read_tile(work, tiles, parts, splits, kv_heads: gl.constexpr, block_keys: gl.constexpr):
    """Returns the KV head and the split that a number of work means, its tile, and the tile's queries and keys."""
    kv_head = work % kv_heads
    split = work // kv_heads % splits
    tile = work // (kv_heads * splits) + 1
    count = gl.load(tiles + tile * 4 + 2)
    seen = gl.load(tiles + tile * 4 + 3)
    if parts is not None:
        low = gl.load(parts + tile * 3 - 3)
        high = gl.load(parts + tile * 3 - 2)
    else:
        share = gl.cdiv(gl.cdiv(seen, splits), block_keys) * block_keys
        low = split * share
        high = gl.minimum(low + share, seen)
    return kv_head, split, tile, count, seen, low, high


@gluon.jit
def _copy_blocks(
    copies,
    bars,
    kv_heads: gl.constexpr,
    page_size: gl.constexpr,
    block_keys: gl.constexpr,
    stages: gl.constexpr,
    dim: gl.constexpr,
):
    """Copies the blocks of all tiles of this program, each when its place in the ring is free."""
    keys, values, page_table, slots, tiles, parts, table_stride, splits, k_ring, v_ring = copies
    k_full, k_free, v_full, v_free = bars
    number = 0
    for turn in range(_count_turns(gl.load(tiles) * kv_heads * splits)):
        work = _find_work(turn)
        kv_head, _, tile, _, _, low, high = _read_tile(work, tiles, parts, splits, kv_heads, block_keys)
        table = page_table + gl.load(slots + gl.load(tiles + tile * 4)) * table_stride
        for start in range(low, high, block_keys):
            stage = number % stages
            phase = (number // stages & 1) ^ 1
            mbarrier.wait(k_free.index(stage), phase)
            full = k_full.index(stage)
            _copy_block(keys, table, start, high, kv_head, k_ring, full, stage, kv_heads, page_size, block_keys, dim)
            mbarrier.wait(v_free.index(stage), phase)
            full = v_full.index(stage)
            _copy_block(values, table, start, high, kv_head, v_ring, full, stage, kv_heads, page_size, block_keys, dim)
            number += 1


@gluon.jit
def _copy_block(
    pages,
    table,
    start,
    high,
    kv_head,
    ring,
    full,
    stage,
    kv_heads: gl.constexpr,
    page_size: gl.constexpr,
    block_keys: gl.constexpr,
    dim: gl.constexpr,
):
    """Copies a block from the row's keys or values; `full` is done when all of it has come."""
    box: gl.constexpr = min(page_size, block_keys)
    boxes: gl.constexpr = block_keys // box
    columns: gl.constexpr = pages.block_shape[1]
    panels: gl.constexpr = dim // columns
    mbarrier.expect(full, block_keys * dim * pages.dtype.primitive_bitwidth // 8)
    for i in gl.static_range(boxes):
        # Beyond the last key, its own page is copied again: the table says nothing there.
        first = gl.minimum(start + i * box, high - 1) // box * box
        place = (gl.load(table + first // page_size) * kv_heads + kv_head) * page_size + first % page_size
        for panel in gl.static_range(panels):
            to = ring.index((stage * panels + panel) * boxes + i)
            tma.async_copy_global_to_shared(pages, [place, panel * columns], full, to)


@gluon.jit
def _widen_blocks(
    widens,
    copied,
    bars,
    kv_heads: gl.constexpr,
    block_keys: gl.constexpr,
    stages: gl.constexpr,
):
    """Widens the copied blocks of all tiles of this program, each when its place in the ring is free."""
    tiles, parts, splits, k_copied, v_copied, k_ring, v_ring = widens
    k_came, k_taken, v_came, v_taken = copied
    k_full, k_free, v_full, v_free = bars
    number = 0
    for turn in range(_count_turns(gl.load(tiles) * kv_heads * splits)):
        work = _find_work(turn)
        _, _, _, _, _, low, high = _read_tile(work, tiles, parts, splits, kv_heads, block_keys)
        for _ in range(low, high, block_keys):
            came = number % (stages - 1)
            came_phase = number // (stages - 1) & 1
            stage = number % stages
            phase = (number // stages & 1) ^ 1
            mbarrier.wait(k_came.index(came), came_phase)
            mbarrier.wait(k_free.index(stage), phase)
            _widen_block(k_copied, came, k_ring.index(stage))
            mbarrier.arrive(k_taken.index(came))
            mbarrier.arrive(k_full.index(stage))
            mbarrier.wait(v_came.index(came), came_phase)
            mbarrier.wait(v_free.index(stage), phase)
            _widen_block(v_copied, came, v_ring.index(stage))
            mbarrier.arrive(v_taken.index(came))
            mbarrier.arrive(v_full.index(stage))
            number += 1


@gluon.jit
def _widen_block(copied, number, target):
    """Widens the copied block of this number, and lets products read the result."""
    block_keys: gl.constexpr = target.shape[0]
    dim: gl.constexpr = target.shape[1]
    keys: gl.constexpr = min(block_keys, _WIDENED // dim)
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [32 // (dim // 16), dim // 16], [4, 1], [1, 0])
    stages: gl.constexpr = copied.shape[0] * copied.shape[1] // block_keys
    source = copied._reinterpret(copied.dtype, [stages, block_keys, dim], copied.layout).index(number)
    for i in gl.static_range(block_keys // keys):
        target.slice(i * keys, keys).store(source.slice(i * keys, keys).load(layout).to(target.dtype))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _compute_rows(
    which,
    reads,
    queries,
    bars,
    kv_heads: gl.constexpr,
    group: gl.constexpr,
    window: gl.constexpr,
    rows: gl.constexpr,
    block_keys: gl.constexpr,
    stages: gl.constexpr,
):
    """Computes 64 rows of all tiles of this program, those from 64 * which on."""
    query, tiles, parts, output, partial, lse, sinks, scale, value_scale, num_queries, splits, k_ring, v_ring = reads
    k_full, k_free, v_full, v_free = bars
    num_heads: gl.constexpr = kv_heads * group
    dim: gl.constexpr = queries.shape[1]
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block_keys, 16])
    of_result: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, dim, 16])
    of_weights: gl.constexpr = gl.DotOperandLayout(0, of_result, 2)
    of_memory: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (dim // 8), dim // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = v_ring.dtype
    k_blocks = k_ring._reinterpret(dtype, [stages, block_keys, dim], queries.layout)
    v_blocks = v_ring._reinterpret(dtype, [stages, block_keys, dim], queries.layout)
    position = gl.arange(0, block_keys, layout=gl.SliceLayout(0, of_scores))
    stat_row = which * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, of_scores))
    row = which * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, of_memory))
    column = gl.arange(0, dim, layout=gl.SliceLayout(0, of_memory))
    none = gl.zeros([64, block_keys], gl.float32, of_scores)
    number = 0
    for turn in range(_count_turns(gl.load(tiles) * kv_heads * splits)):
        work = _find_work(turn)
        kv_head, split, tile, count, seen, low, high = _read_tile(work, tiles, parts, splits, kv_heads, block_keys)
        first_query = gl.load(tiles + tile * 4 + 1)
        head = (first_query + row // group).to(gl.int64) * num_heads + kv_head * group + row % group
        place = head[:, None] * dim + column[None, :]
        inside = gl.expand_dims(row // group < count, 1)
        loaded = gl.load(query + place, mask=inside, other=0.0)
        if loaded.dtype != dtype:
            loaded = gl.minimum(gl.maximum(loaded.to(gl.float32), -_LARGEST_HALF), _LARGEST_HALF)
        queries.store(loaded.to(dtype))
        fence_async_shared()
        gl.thread_barrier()
        ends = seen + stat_row * 0
        left = -1  # blocks that begin before it are outside of some query's window
        if parts is not None:
            ends = seen + stat_row // group
            if window > 0:
                left = seen + count - 1 - window
        top = gl.full([64], -float("inf"), gl.float32, gl.SliceLayout(1, of_scores))
        total = gl.zeros([64], gl.float32, gl.SliceLayout(1, of_scores))
        mixed = gl.zeros([64, dim], gl.float32, of_result)
        if sinks is not None:
            is_last = high == seen + count - 1
            sink = gl.load(sinks + kv_head * group + stat_row % group).to(gl.float32) * 1.4426950408889634
            top = gl.where(is_last, sink, top)
            total = gl.where(is_last, 1.0, total)
        if high > low:
            stage = number % stages
            mbarrier.wait(k_full.index(stage), number // stages & 1)
            scores = warpgroup_mma(
                queries, k_blocks.index(stage).permute((1, 0)), none, use_acc=False, is_async=True
            )  # fmt: skip
            scores = warpgroup_mma_wait(num_outstanding=0, deps=(scores,))
            mbarrier.arrive(k_free.index(stage))
            weights, sums, top, shrink = _weigh(
                scores, top, position, ends, low, seen, high, left, scale, window, block_keys
            )
            total = total * shrink + sums
            ready = gl.convert_layout(weights.to(dtype), of_weights)
            for start in range(low + block_keys, high, block_keys):
                before = number % stages
                v_phase = number // stages & 1
                number += 1
                stage = number % stages
                mbarrier.wait(k_full.index(stage), number // stages & 1)
                scores = warpgroup_mma(
                    queries, k_blocks.index(stage).permute((1, 0)), none, use_acc=False, is_async=True
                )  # fmt: skip
                mbarrier.wait(v_full.index(before), v_phase)
                mixed = warpgroup_mma(ready, v_blocks.index(before), mixed, is_async=True)
                scores = warpgroup_mma_wait(num_outstanding=1, deps=(scores,))
                mbarrier.arrive(k_free.index(stage))
                weights, sums, top, shrink = _weigh(
                    scores, top, position, ends, start, seen, high, left, scale, window, block_keys
                )
                total = total * shrink + sums
                mixed = warpgroup_mma_wait(num_outstanding=0, deps=(mixed, ready))[0]
                mbarrier.arrive(v_free.index(before))
                mixed = mixed * gl.convert_layout(shrink, gl.SliceLayout(1, of_result))[:, None]
                ready = gl.convert_layout(weights.to(dtype), of_weights)
            stage = number % stages
            mbarrier.wait(v_full.index(stage), number // stages & 1)
            last = low + (high - 1 - low) // block_keys * block_keys
            if last + block_keys > high:
                # Values beyond the last key may be anything, also no number: a weight of 0 does not hide that.
                token = last + gl.arange(0, block_keys, layout=gl.SliceLayout(1, of_memory))
                value = v_blocks.index(stage).load(of_memory)
                v_blocks.index(stage).store(gl.where((token < high)[:, None], value, 0.0))
                fence_async_shared()
                gl.thread_barrier()
            mixed = warpgroup_mma(ready, v_blocks.index(stage), mixed, is_async=True)
            mixed = warpgroup_mma_wait(num_outstanding=0, deps=(mixed,))
            mbarrier.arrive(v_free.index(stage))
            number += 1
        total = gl.where(total > 0.0, total, 1.0)  # no keys give 0 and a log-sum-exp of -inf
        divisor = gl.convert_layout(total / value_scale, gl.SliceLayout(1, of_result))
        result = gl.convert_layout(mixed / divisor[:, None], of_memory)
        is_query = stat_row // group < count
        in_head = kv_head * group + stat_row % group
        if parts is None:
            part = split.to(gl.int64) * num_queries * num_heads
            gl.store(output + part * dim + place, result.to(output.dtype.element_ty), mask=inside)
            stat_head = (first_query + stat_row // group).to(gl.int64) * num_heads + in_head
            gl.store(lse + part + stat_head, top + gl.log2(total), mask=is_query)
        else:
            part = gl.load(parts + tile * 3 - 1)
            if part < 0:
                gl.store(output + place, result.to(output.dtype.element_ty), mask=inside)
            else:
                first = (part * (rows // group)).to(gl.int64)
                in_part = (first + row // group) * num_heads + kv_head * group + row % group
                gl.store(partial + in_part[:, None] * dim + column[None, :], result, mask=inside)
                gl.store(lse + (first + stat_row // group) * num_heads + in_head, top + gl.log2(total), mask=is_query)


@gluon.jit
def _weigh(
    scores, top, position, ends, start, seen, high, left, scale, window: gl.constexpr, block_keys: gl.constexpr
):  # fmt: skip
    """Returns the weights of a block, their sums, the rows' new tops, and what earlier results shrink by."""
    if (start + block_keys > gl.minimum(seen, high)) | (start < left):
        visible = (start + position)[None, :] < gl.minimum(ends, high)[:, None]
        if window > 0:
            visible = visible & ((start + position)[None, :] >= (ends - window)[:, None])
        scores = gl.where(visible, scores, -float("inf"))
    new_top = gl.maximum(top, gl.max(scores, 1) * scale)
    base = gl.where(new_top == -float("inf"), 0.0, new_top)  # a row may see nothing of the block
    weights = gl.exp2(scores * scale - base[:, None])
    return weights, gl.sum(weights, 1), new_top, gl.exp2(top - base)


@launch_quickly
@gluon.jit(
    do_not_specialize=["table_stride", "num_queries", "splits"],
    do_not_specialize_on_alignment=["page_table", "slots", "tiles", "parts"],
)
def _prefill_hopper(
    query,
    keys,
    values,
    page_table,
    slots,
    tiles,
    output,
    parts,
    partial,
    lse,
    sinks,
    scale,
    value_scale,
    table_stride,
    num_queries,
    splits,
    kv_heads: gl.constexpr,
    group: gl.constexpr,
    dim: gl.constexpr,
    page_size: gl.constexpr,
    window: gl.constexpr,
    rows: gl.constexpr,
    block_keys: gl.constexpr,
    stages: gl.constexpr,
    registers: gl.constexpr,
    widening: gl.constexpr,
):
    is_widened: gl.constexpr = widening > 0
    operand: gl.constexpr = gl.float16 if is_widened else keys.dtype
    box: gl.constexpr = min(page_size, block_keys)
    columns: gl.constexpr = keys.block_shape[1]
    num_copied: gl.constexpr = stages - 1 if is_widened else stages  # blocks; what is widened is a stage more
    boxes: gl.constexpr = num_copied * (dim // columns) * (block_keys // box)
    in_block: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, dim], operand)
    k_copied = gl.allocate_shared_memory(keys.dtype, [boxes, box, columns], keys.layout)
    v_copied = gl.allocate_shared_memory(keys.dtype, [boxes, box, columns], keys.layout)
    queries = gl.allocate_shared_memory(operand, [rows // 64, 64, dim], in_block)
    copied = _make_bars(num_copied, 1 if is_widened else rows // 64)
    bars = copied
    k_ring = k_copied
    v_ring = v_copied
    if is_widened:
        bars = _make_bars(stages, rows // 64)
        k_ring = gl.allocate_shared_memory(operand, [stages, block_keys, dim], in_block)
        v_ring = gl.allocate_shared_memory(operand, [stages, block_keys, dim], in_block)
    fence_async_shared()
    reads = (query, tiles, parts, output, partial, lse, sinks, scale, value_scale, num_queries, splits, k_ring, v_ring)
    copies = (keys, values, page_table, slots, tiles, parts, table_stride, splits, k_copied, v_copied)
    widens = (tiles, parts, splits, k_copied, v_copied, k_ring, v_ring)
    gl.static_assert(rows == 128 or rows == 256)
    if rows == 128 and is_widened:
        gl.warp_specialize(
            [
                (_compute_rows, (0, reads, queries.index(0), bars, kv_heads, group, window, rows, block_keys, stages)),
                (_compute_rows, (1, reads, queries.index(1), bars, kv_heads, group, window, rows, block_keys, stages)),
                (_copy_blocks, (copies, copied, kv_heads, page_size, block_keys, num_copied, dim)),
                (_widen_blocks, (widens, copied, bars, kv_heads, block_keys, stages)),
            ],
            [4, 1, 4],
            [registers, _COPYING, widening],
        )
    elif rows == 128:
        gl.warp_specialize(
            [
                (_compute_rows, (0, reads, queries.index(0), bars, kv_heads, group, window, rows, block_keys, stages)),
                (_compute_rows, (1, reads, queries.index(1), bars, kv_heads, group, window, rows, block_keys, stages)),
                (_copy_blocks, (copies, copied, kv_heads, page_size, block_keys, num_copied, dim)),
            ],
            [4, 1],
            [registers, _COPYING],
        )
    elif is_widened:
        gl.warp_specialize(
            [
                (_compute_rows, (0, reads, queries.index(0), bars, kv_heads, group, window, rows, block_keys, stages)),
                (_compute_rows, (1, reads, queries.index(1), bars, kv_heads, group, window, rows, block_keys, stages)),
                (_compute_rows, (2, reads, queries.index(2), bars, kv_heads, group, window, rows, block_keys, stages)),
                (_compute_rows, (3, reads, queries.index(3), bars, kv_heads, group, window, rows, block_keys, stages)),
                (_copy_blocks, (copies, copied, kv_heads, page_size, block_keys, num_copied, dim)),
                (_widen_blocks, (widens, copied, bars, kv_heads, block_keys, stages)),
            ],
            [4, 4, 4, 1, 4],
            [registers, registers, registers, _COPYING, widening],
        )
    else:
        gl.warp_specialize(
            [
                (_compute_rows, (0, reads, queries.index(0), bars, kv_heads, group, window, rows, block_keys, stages)),
                (_compute_rows, (1, reads, queries.index(1), bars, kv_heads, group, window, rows, block_keys, stages)),
                (_compute_rows, (2, reads, queries.index(2), bars, kv_heads, group, window, rows, block_keys, stages)),
                (_compute_rows, (3, reads, queries.index(3), bars, kv_heads, group, window, rows, block_keys, stages)),
                (_copy_blocks, (copies, copied, kv_heads, page_size, block_keys, num_copied, dim)),
            ],
            [4, 4, 4, 1],
            [registers, registers, registers, _COPYING],
        )


@gluon.jit
def _make_bars(stages: gl.constexpr, frees: gl.constexpr):
    """Makes what tells that keys or values of a stage are full, and that so many groups have read them."""
    k_full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(stages):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_free.index(i), count=frees)
        mbarrier.init(v_free.index(i), count=frees)
    return k_full, k_free, v_full, v_free
