"""Attention of tiles of queries over the pages of one row each: prompts' chunks, and prefixes that rows share.

FlashAttention-2 (arXiv:2307.08691) with keys gathered through the page table, and the query heads of a KV head side by
side in a tile (arXiv:2305.13245). Knows no batches: a tile says which row it reads and which queries are its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from toka_async.kernels.decode import Partial, cap_scores, fold_soft_cap, load_sinks
from toka_async.kernels.launches.quick import launch_quickly
from toka_async.kernels.launches.sizes import round_to_power
from toka_async.kernels.stored import choose_operand, to_operand

GLUON = "3.6."  # versions of Triton for which `prefill_hopper` is written: each has another Gluon


@dataclass(slots=True, frozen=True)
class PrefillConfig:
    """block_queries: query heads of a tile, for all its queries. block_keys: keys of one iteration.

    registers: of a thread of the kernel for Hopper chips (`kernels.prefill_hopper`); 0: the kernel for any chip.
    widening: registers of a thread there that widens what is stored in E4M3; 0: there is none.
    """

    block_queries: int
    block_keys: int
    num_warps: int
    num_stages: int
    registers: int = 0
    widening: int = 0

    def queries(self, group_size: int) -> int:
        """Returns the queries of a tile when a KV head has `group_size` query heads."""
        return max(1, self.block_queries // group_size)


def is_hopper(device: torch.device) -> bool:
    """Tells whether the kernel for Hopper chips can be built and run there."""
    is_it = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    return is_it and triton.__version__.startswith(GLUON)


def list_hopper_configs(
    head_dim: int,
    group_size: int,
    dtype: torch.dtype,
    page_size: int,
    device: torch.device,
    is_e4m3: bool = False,
    soft_cap: float = 0.0,
) -> list[PrefillConfig]:
    """Lists the tiles of the kernel for Hopper chips; none where it cannot attend such heads over such pages.

    dtype: of queries. is_e4m3: keys and values are stored in 8 bits. All groups of threads share the registers.
    """
    if head_dim not in (64, 128, 256) or dtype == torch.float32 or soft_cap or not is_hopper(device):
        return []
    from toka_async.kernels import prefill_hopper

    if head_dim == 64:
        registers, widening = (104, 40) if is_e4m3 else (112, 0)
        config = PrefillConfig(256, 64, 4, num_stages=3, registers=registers, widening=widening)
    elif is_e4m3:
        return []  # pages that many queries read are widened before (`attention.wide`)
    elif head_dim == 128:
        config = PrefillConfig(128, 128, 4, num_stages=2, registers=232)
    else:
        config = PrefillConfig(128, 64, 4, num_stages=2, registers=240)
    fits = group_size <= config.block_queries and prefill_hopper.can_copy(page_size, config.block_keys)
    return [config] if fits else []


def list_prefill_configs(head_dim: int, group_size: int, dtype: torch.dtype) -> list[PrefillConfig]:
    """Lists the tiles of the kernel for any chip, the best first: as large as a Hopper chip's registers allow.

    Further ones need less shared memory; `kernels.built` finds the first that fits a chip.
    """
    least = round_to_power(group_size)
    if dtype == torch.float32:
        return [PrefillConfig(max(16, least), 32 if head_dim <= 128 else 16, num_warps=4, num_stages=1)]
    if head_dim > 256:
        return [
            PrefillConfig(max(64, least), 32, num_warps=8, num_stages=2),
            PrefillConfig(max(32, least), 16, num_warps=4, num_stages=1),
        ]
    if head_dim <= 128:
        return [
            PrefillConfig(max(128, least), 64, num_warps=8 if head_dim <= 64 else 4, num_stages=3),
            PrefillConfig(max(64, least), 32, num_warps=4, num_stages=2),
        ]
    return [
        PrefillConfig(max(128, least), 32, num_warps=8, num_stages=2),
        PrefillConfig(max(64, least), 32, num_warps=8, num_stages=2),
        PrefillConfig(max(64, least), 16, num_warps=8, num_stages=2),
    ]


def attend_chunks(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    slots: Tensor,
    tiles: Tensor,
    num_programs: int,
    output: Tensor,
    scale: float,
    window: int,
    config: PrefillConfig,
    parts: Tensor,
    partial: Partial,
    value_scale: float = 1.0,
    sinks: Tensor | None = None,
    soft_cap: float = 0.0,
) -> Any:
    """Writes causal attention of the tiles' queries to output; both are [tokens, heads, dim] and contiguous.

    keys, values [pages, kv_heads, page_size, dim]; page_table int32 [slots, width]; slots int64 [rows]. tiles int32 [1
    + n, 4]: first (n, -, -, -); then for each tile its row, its first query, its number of queries (at most
    `config.queries`) and the keys that the first query sees; each further query sees one more. A query sees the last
    `window` of them, 0: all. num_programs: programs that go through the tiles, best one each. Returns the kernel.

    parts int32 [n, 3]: of each tile the first and the end of its keys, whole blocks but for the last key of all; then
    where its result goes: to output for -1, for i to the i-th `config.queries` rows of partial, float32 [rows, ...],
    which the caller merges. value_scale: multiplies the result. sinks [heads], soft_cap: see `decode_attention`; sinks
    are in the last part of a tile.
    """
    split = (parts, partial.output, partial.lse, sinks)
    scales = scale, soft_cap, value_scale
    return _launch(
        query, keys, values, page_table, slots, tiles, num_programs, output, *split, *scales, window, 1, config
    )


def attend_prefixes(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    slots: Tensor,
    tiles: Tensor,
    num_programs: int,
    result: Partial,
    scale: float,
    config: PrefillConfig,
    soft_cap: float = 0.0,
) -> None:
    """Attends as `attend_chunks`, but all queries of a tile see the same keys, split over result's [p, rows, ...].

    Sinks are left to what attends the rest of the rows' keys.
    """
    to, splits = (result.output, None, None, result.lse, None), len(result.lse)
    scales = scale, soft_cap, 1.0
    _launch(query, keys, values, page_table, slots, tiles, num_programs, *to, *scales, 0, splits, config)


def _launch(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    slots: Tensor,
    tiles: Tensor,
    num_programs: int,
    output: Tensor,
    parts: Tensor | None,
    partial: Tensor | None,
    lse: Tensor,
    sinks: Tensor | None,
    scale: float,
    soft_cap: float,
    value_scale: float,
    window: int,
    splits: int,
    config: PrefillConfig,
) -> Any:
    num_queries, num_heads, dim = query.shape
    kv_heads, page_size = keys.shape[1:3]
    group = num_heads // kv_heads
    assert query.is_contiguous()
    assert output.is_contiguous()
    assert group <= config.block_queries
    factor, limit = fold_soft_cap(scale, soft_cap)
    operands = (query, keys, values, page_table, slots, tiles, output, parts, partial, lse, sinks, factor)
    assert (config.widening > 0) == (config.registers > 0 and keys.dtype != query.dtype)
    if config.registers:
        from toka_async.kernels.prefill_hopper import attend_tiles

        assert not limit, "`list_hopper_configs` has no tiles for soft caps"

        shape = config.block_queries, config.block_keys, config.num_stages, config.registers, config.widening
        return attend_tiles(*operands, value_scale, num_programs, window, splits, *shape)
    return _prefill[num_programs, kv_heads, splits](
        *operands,
        1 / value_scale,
        page_table.stride(0),
        num_queries,
        kv_heads=kv_heads,
        group=group,
        dim=dim,
        dim_pad=max(16, round_to_power(dim)),
        page_size=page_size,
        window=window,
        limit=limit,
        block_queries=config.block_queries,
        block_keys=config.block_keys,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        # Two programs a multiprocessor: the compiler would take 50 registers more otherwise.
        maxnreg=128 if parts is not None and config.num_warps == 8 and dim <= 64 else None,
    )


@launch_quickly
@triton.jit(
    do_not_specialize=["table_stride", "num_queries"],
    do_not_specialize_on_alignment=["page_table", "slots", "tiles", "parts"],
)
def _prefill(
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
    divisor,
    table_stride,
    num_queries,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    dim: tl.constexpr,
    dim_pad: tl.constexpr,
    page_size: tl.constexpr,
    window: tl.constexpr,
    limit: tl.constexpr,
    block_queries: tl.constexpr,
    block_keys: tl.constexpr,
):
    num_heads: tl.constexpr = kv_heads * group
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    in_tile = tl.arange(0, block_queries)
    step = in_tile // group  # the query's number in the tile
    column = tl.arange(0, dim_pad)
    head_keys, head_values = keys + kv_head * page_size * dim, values + kv_head * page_size * dim

    num_tiles = tl.load(tiles)
    for tile in range(tl.program_id(0) + 1, num_tiles + 1, tl.num_programs(0)):
        row = tl.load(tiles + tile * 4)
        first_query = tl.load(tiles + tile * 4 + 1)
        count = tl.load(tiles + tile * 4 + 2)
        seen = tl.load(tiles + tile * 4 + 3)
        table = page_table + tl.load(slots + row) * table_stride

        is_query = step < count
        head = (first_query + step).to(tl.int64) * num_heads + kv_head * group + in_tile % group
        place = head[:, None] * dim + column[None, :]
        inside = is_query[:, None] & (column < dim)[None, :]
        operand: tl.constexpr = choose_operand(query.dtype.element_ty, keys.dtype.element_ty)
        queries = to_operand(tl.load(query + place, mask=inside, other=0.0), operand)

        if parts is not None:
            low = tl.load(parts + tile * 3 - 3)
            high = tl.load(parts + tile * 3 - 2)
            ends = seen + step
        else:
            ends = seen + step * 0
            share = tl.cdiv(tl.cdiv(seen, tl.num_programs(2)), block_keys) * block_keys
            low = split * share
            high = tl.minimum(low + share, seen)
        # The blocks from `middle` to `full` need no mask: every query sees them whole.
        full = low + tl.maximum(tl.minimum(seen, high) - low, 0) // block_keys * block_keys
        middle = low
        top = tl.full([block_queries], -float("inf"), tl.float32)
        total = tl.zeros([block_queries], tl.float32)
        mixed = tl.zeros([block_queries, dim_pad], tl.float32)
        if sinks is not None:
            has_sink = is_query & (high == seen + count - 1)
            top = load_sinks(sinks, kv_head * group + in_tile % group, has_sink)
            total = tl.where(has_sink, 1.0, 0.0)
        if window > 0:
            left_out = tl.maximum(seen + count - 1 - window - low, 0)
            middle = tl.minimum(low + tl.cdiv(left_out, block_keys) * block_keys, high)
            top, total, mixed = _attend(
                top, total, mixed, queries, head_keys, head_values, table, low, middle, high, ends, scale,
                True, kv_heads, dim, dim_pad, page_size, window, limit, block_keys,
            )  # fmt: skip
        full = tl.maximum(full, middle)
        top, total, mixed = _attend(
            top, total, mixed, queries, head_keys, head_values, table, middle, full, high, ends, scale,
            False, kv_heads, dim, dim_pad, page_size, window, limit, block_keys,
        )  # fmt: skip
        top, total, mixed = _attend(
            top, total, mixed, queries, head_keys, head_values, table, full, high, high, ends, scale,
            True, kv_heads, dim, dim_pad, page_size, window, limit, block_keys,
        )  # fmt: skip

        total = tl.where(total > 0.0, total, 1.0)  # no keys give 0 and a log-sum-exp of -inf
        result = mixed / (total * divisor)[:, None]
        if parts is None:
            before = split.to(tl.int64) * num_queries * num_heads
            tl.store(output + before * dim + place, result.to(output.dtype.element_ty), mask=inside)
            tl.store(lse + before + head, top + tl.log2(total), mask=is_query)
        else:
            number = tl.load(parts + tile * 3 - 1)
            if number < 0:
                tl.store(output + place, result.to(output.dtype.element_ty), mask=inside)
            else:
                in_partial = number * (block_queries // group) + step
                at = in_partial.to(tl.int64) * num_heads + kv_head * group + in_tile % group
                tl.store(partial + at[:, None] * dim + column[None, :], result, mask=inside)
                tl.store(lse + at, top + tl.log2(total), mask=is_query)


@triton.jit
def _attend(
    top,
    total,
    mixed,
    queries,
    head_keys,
    head_values,
    table,
    first,
    last,
    high,
    ends,
    scale,
    masked: tl.constexpr,
    kv_heads: tl.constexpr,
    dim: tl.constexpr,
    dim_pad: tl.constexpr,
    page_size: tl.constexpr,
    window: tl.constexpr,
    limit: tl.constexpr,
    block_keys: tl.constexpr,
):
    """Continues the online softmax over keys first to last, of which those below `high` exist."""
    column = tl.arange(0, dim_pad)
    for start in range(first, last, block_keys):
        position = start + tl.arange(0, block_keys)
        if masked:
            page = tl.load(table + position // page_size, mask=position < high, other=0).to(tl.int64)
            inside = (position < high)[:, None] & (column < dim)[None, :]
        else:
            page = tl.load(table + position // page_size).to(tl.int64)
            inside = (column < dim)[None, :]
        offset = (page * (kv_heads * page_size) + position % page_size) * dim
        place = offset[:, None] + column[None, :]
        if masked or dim < dim_pad:
            key = tl.load(head_keys + place, mask=inside, other=0.0)
        else:
            key = tl.load(head_keys + place)
        scores = tl.dot(queries, tl.trans(key.to(queries.dtype)), input_precision="ieee")
        factor = scale
        if limit > 0:
            scores = cap_scores(scores * scale, limit)
            factor = 1.0
        if masked:
            seen = position[None, :] < ends[:, None]
            if window > 0:
                seen &= position[None, :] >= ends[:, None] - window
            scores = tl.where(seen, scores * factor, -float("inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            base = tl.where(new_top == -float("inf"), 0.0, new_top)  # a query may see nothing of the block
            weights = tl.exp2(scores - base[:, None])
        else:
            new_top = tl.maximum(top, tl.max(scores, 1) * factor)
            base = new_top
            weights = tl.exp2(scores * factor - base[:, None])
        shrink = tl.exp2(top - base)
        if masked or dim < dim_pad:
            value = tl.load(head_values + place, mask=inside, other=0.0)
        else:
            value = tl.load(head_values + place)
        total = total * shrink + tl.sum(weights, 1)
        mixed *= shrink[:, None]
        mixed = tl.dot(weights.to(queries.dtype), value.to(queries.dtype), mixed, input_precision="ieee")
        top = new_top
    return top, total, mixed
