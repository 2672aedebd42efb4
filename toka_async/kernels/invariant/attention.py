"""Attention of tiles of queries whose arithmetic for a query depends on its row's keys and its position alone.

As `kernels.prefill`, with less freedom: blocks of keys begin at multiples of their size, counted from the row's first
key, each of them is summed by one and the same code, and a decoding row is a tile of one query. So a query's place in
its tile, the tile's other queries and the number of tiles change no bit. Nothing is split over programs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from toka_async.kernels.decode import cap_scores, fold_soft_cap, load_sinks
from toka_async.kernels.launches.quick import launch_quickly
from toka_async.kernels.launches.sizes import round_to_power
from toka_async.kernels.stored import choose_operand, to_operand


@dataclass(slots=True, frozen=True)
class QueryTile:
    """block_queries: query heads of a tile, for all its queries. block_keys: keys of one iteration."""

    block_queries: int
    block_keys: int
    num_warps: int
    num_stages: int

    def count_queries(self, group_size: int) -> int:
        """Counts the queries of a tile when a KV head has `group_size` query heads."""
        return max(1, self.block_queries // group_size)


def choose_query_tile(head_dim: int, group_size: int, dtype: torch.dtype) -> QueryTile:
    """Chooses the one tile for decoding rows and chunks: 64 query heads are the fewest that Hopper multiplies fast.

    Of heads beyond 256 dimensions, no more than 32 fit the shared memory of small chips.
    """
    least = round_to_power(group_size)
    if dtype == torch.float32:
        return QueryTile(max(16, least), 32 if head_dim <= 128 else 16, num_warps=4, num_stages=1)
    if head_dim > 256:
        return QueryTile(max(32, least), 16, num_warps=4, num_stages=1)
    return QueryTile(max(64, least), 64 if head_dim <= 128 else 32, num_warps=4, num_stages=2)


def attend_tiles(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    slots: Tensor,
    tiles: Tensor,
    output: Tensor,
    scale: float,
    window: int,
    config: QueryTile,
    value_scale: float = 1.0,
    sinks: Tensor | None = None,
    soft_cap: float = 0.0,
) -> None:
    """Writes causal attention of the tiles' queries to output; both are [tokens, heads, dim] and contiguous.

    keys, values [pages, kv_heads, page_size, dim]; page_table int32 [slots, width]; slots int64 [rows]. tiles int32 [n,
    4]: each tile's row, its first query, its number of queries (at most those of `config`) and the keys that the first
    query sees; each further query sees one more. A query sees the last `window` of them, 0: all.
    value_scale: multiplies the result. sinks [heads], soft_cap: see `kernels.decode.decode_attention`.
    """
    num_heads, dim = query.shape[1:]
    kv_heads, page_size = keys.shape[1:3]
    group = num_heads // kv_heads
    assert query.is_contiguous()
    assert output.is_contiguous()
    assert tiles.is_contiguous()
    assert group <= config.block_queries
    factor, limit = fold_soft_cap(scale, soft_cap)
    _attend_tile[len(tiles), kv_heads](
        query,
        keys,
        values,
        page_table,
        slots,
        tiles,
        output,
        sinks,
        factor,
        1 / value_scale,
        window or _EVERYTHING,
        page_table.stride(0),
        kv_heads=kv_heads,
        group=group,
        dim=dim,
        dim_pad=max(16, round_to_power(dim)),
        page_size=page_size,
        limit=limit,
        block_queries=config.block_queries,
        block_keys=config.block_keys,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


_EVERYTHING = 2**30  # keys; more than a context has


# The window is no constant: whether another row outgrows it must not choose another program.
@launch_quickly
@triton.jit(
    do_not_specialize=["table_stride", "window"],
    do_not_specialize_on_alignment=["page_table", "slots", "tiles"],
)
def _attend_tile(
    query,
    keys,
    values,
    page_table,
    slots,
    tiles,
    output,
    sinks,
    scale,
    divisor,
    window,
    table_stride,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    dim: tl.constexpr,
    dim_pad: tl.constexpr,
    page_size: tl.constexpr,
    limit: tl.constexpr,
    block_queries: tl.constexpr,
    block_keys: tl.constexpr,
):
    """One program attends one tile and KV head. scale: of base-2 exponents."""
    num_heads: tl.constexpr = kv_heads * group
    tile = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    row = tl.load(tiles + tile * 4)
    first_query = tl.load(tiles + tile * 4 + 1)
    count = tl.load(tiles + tile * 4 + 2)
    seen = tl.load(tiles + tile * 4 + 3)
    table = page_table + tl.load(slots + row) * table_stride

    in_tile = tl.arange(0, block_queries)
    column = tl.arange(0, dim_pad)
    step = in_tile // group  # the query's number in the tile
    head = (first_query + step).to(tl.int64) * num_heads + kv_head * group + in_tile % group
    place = head[:, None] * dim + column[None, :]
    inside = (step < count)[:, None] & (column < dim)[None, :]
    operand: tl.constexpr = choose_operand(query.dtype.element_ty, keys.dtype.element_ty)
    queries = to_operand(tl.load(query + place, mask=inside, other=0.0), operand)

    # A query sees the keys from `begins` to `ends`.
    ends = seen + step
    begins = tl.maximum(ends - window, 0)
    high = seen + count - 1
    low = tl.maximum(seen - window, 0) // block_keys * block_keys
    head_keys, head_values = keys + kv_head * page_size * dim, values + kv_head * page_size * dim
    top = tl.full([block_queries], -float("inf"), tl.float32)
    total = tl.zeros([block_queries], tl.float32)
    mixed = tl.zeros([block_queries, dim_pad], tl.float32)
    if sinks is not None:
        top = load_sinks(sinks, kv_head * group + in_tile % group, step < count)
        total = tl.full([block_queries], 1.0, tl.float32)
    for start in range(low, high, block_keys):
        position = start + tl.arange(0, block_keys)
        page = tl.load(table + position // page_size, mask=position < high, other=0).to(tl.int64)
        at = ((page * (kv_heads * page_size) + position % page_size) * dim)[:, None] + column[None, :]
        exists = (position < high)[:, None] & (column < dim)[None, :]
        key = tl.load(head_keys + at, mask=exists, other=0.0).to(operand)
        scores = tl.dot(queries, tl.trans(key), input_precision="ieee")
        factor = scale
        if limit > 0:
            scores = cap_scores(scores * scale, limit)
            factor = 1.0
        sees = (position[None, :] < ends[:, None]) & (position[None, :] >= begins[:, None])
        scores = tl.where(sees, scores, -float("inf"))
        # Products and sums are fused as written here; a compiler that may choose could choose otherwise elsewhere. A
        # block of which a query sees nothing leaves its top, total and mix as they are.
        new_top = tl.maximum(top, tl.max(scores, 1) * factor)
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        weights = tl.exp2(tl.fma(scores, factor, -base[:, None]))
        shrink = tl.exp2(top - base)
        value = tl.load(head_values + at, mask=exists, other=0.0).to(operand)
        total = tl.fma(total, shrink, tl.sum(weights, 1))
        mixed = tl.dot(weights.to(operand), value, mixed * shrink[:, None], input_precision="ieee")
        top = new_top
    total = tl.where(total > 0.0, total, 1.0)
    tl.store(output + place, (mixed / (total * divisor)[:, None]).to(output.dtype.element_ty), mask=inside)
