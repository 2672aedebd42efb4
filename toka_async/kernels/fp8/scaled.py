"""Products of quantized activations with quantized weights, by scales of tokens and outputs, or of blocks.

Our kernel computes what cuBLASLt does not: scales by blocks on chips other than Hopper, scales by channel on some, and
shapes that it has no algorithm for. Needs a chip that multiplies 8-bit floats (compute capability 8.9).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from toka_async.kernels.launches.quick import launch_quickly
from toka_async.kernels.launches.sizes import divide_up
from toka_async.kernels.scaled_weight import BLOCK, Quantized, ScaledWeight, split_weight

_GROUP_TILES = 8  # row tiles that share weights in the L2 cache


@dataclass(slots=True, frozen=True)
class ScaledTile:
    """The part of the output that one program computes: rows x columns, with `BLOCK` inputs at a time."""

    rows: int
    columns: int
    num_stages: int
    num_warps: int


LARGEST_TILE = ScaledTile(128, 128, num_stages=3, num_warps=8)
# For up to so many rows, the best first; each takes at most 96 KiB of shared memory.
TILES = {
    16: tuple(ScaledTile(16, columns, num_stages=4, num_warps=4) for columns in (64, 32, 16)),
    64: tuple(ScaledTile(64, columns, num_stages=4, num_warps=4) for columns in (64, 32, 16)),
    1 << 31: (LARGEST_TILE, ScaledTile(64, 64, num_stages=4, num_warps=4)),
}
_ENOUGH = 128  # programs that keep a large chip's memory busy; smaller tiles make more of them


def choose_scaled_tile(num_rows: int, num_outputs: int) -> ScaledTile:
    """Chooses the best tile that makes enough programs, or the smallest."""
    tiles = next(tiles for most, tiles in TILES.items() if num_rows <= most)
    for tile in tiles:
        if divide_up(num_rows, tile.rows) * divide_up(num_outputs, tile.columns) >= _ENOUGH:
            return tile
    return tiles[-1]


def multiply_scaled(
    rows: Quantized,
    weight: ScaledWeight,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    tile: ScaledTile | None = None,
) -> Tensor:
    """x Wᵀ + b: [t, k] and [n, k] to [t, n] of the dtype, or added to `residual` [t, n] in place.

    tile: None: that of `choose_scaled_tile`.
    """
    (x, x_scales), (n, k), num_rows = rows, weight.shape, len(rows[0])
    assert x.is_contiguous()
    assert x.shape[1] == k
    assert weight.values.is_contiguous()
    assert residual is None or (residual.is_contiguous() and residual.shape == (num_rows, n))
    assert x_scales.shape == (num_rows, k // BLOCK if weight.by_block else 1)
    output = torch.empty(num_rows, n, dtype=dtype, device=x.device) if residual is None else residual
    tile = tile or choose_scaled_tile(num_rows, n)
    if num_rows:
        _scaled_product[(divide_up(num_rows, tile.rows) * divide_up(n, tile.columns),)](
            x,
            x_scales,
            weight.values,
            weight.scales,
            bias,
            output,
            num_rows,
            x_scales.stride(0),
            x_scales.stride(1),
            n=n,
            k=k,
            block_stride=split_weight(weight)[2],
            adds=residual is not None,
            rows=tile.rows,
            columns=tile.columns,
            depth=BLOCK,
            group=_GROUP_TILES,
            num_stages=tile.num_stages,
            num_warps=tile.num_warps,
        )
    return output


@launch_quickly
@triton.jit(do_not_specialize=["num_rows", "token_stride", "group_stride"])
def _scaled_product(
    x_at,
    x_scales_at,
    weight_at,
    scales_at,
    bias_at,
    output_at,
    num_rows,
    token_stride,
    group_stride,
    n: tl.constexpr,
    k: tl.constexpr,
    block_stride: tl.constexpr,
    adds: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
    group: tl.constexpr,
):
    """One program computes one tile, whose columns are within one block. adds: to what is in the output."""
    by_block: tl.constexpr = block_stride > 0
    row_tiles = tl.cdiv(num_rows, rows)
    column_tiles: tl.constexpr = (n + columns - 1) // columns
    # Tiles that are computed at the same time share rows and columns.
    tile = tl.program_id(0)
    first = tile // (group * column_tiles) * group
    height = tl.minimum(row_tiles - first, group)
    row = (first + tile % (group * column_tiles) % height) * rows + tl.arange(0, rows)
    first_column = tile % (group * column_tiles) // height * columns
    column = first_column + tl.arange(0, columns)
    # What lies beyond the ends is computed from the first row or column, and not stored.
    x_row = tl.where(row < num_rows, row, 0).to(tl.int64)
    weight_row = tl.where(column < n, column, 0).to(tl.int64)
    inputs = tl.arange(0, depth)
    x_at += x_row[:, None] * k + inputs[None, :]
    weight_at += weight_row[None, :] * k + inputs[:, None]
    x_scales_at += x_row * token_stride
    total = tl.zeros((rows, columns), tl.float32)
    for begin in range(0, k, depth):
        if k % depth:
            x = tl.load(x_at + begin, mask=inputs[None, :] < k - begin, other=0.0)
            weight = tl.load(weight_at + begin, mask=inputs[:, None] < k - begin, other=0.0)
        else:
            x = tl.load(x_at + begin)
            weight = tl.load(weight_at + begin)
        if by_block:
            scale = tl.load(scales_at + first_column // depth * block_stride + begin // depth)
            total += tl.dot(x, weight) * (tl.load(x_scales_at + begin // depth * group_stride) * scale)[:, None]
        else:
            total = tl.dot(x, weight, total)
    if not by_block:
        total *= tl.load(x_scales_at)[:, None] * tl.load(scales_at + weight_row)[None, :]
    inside = (row < num_rows)[:, None] & (column < n)[None, :]
    output_at += row.to(tl.int64)[:, None] * n + column[None, :]
    if bias_at is not None:
        total += tl.load(bias_at + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
    if adds:
        total += tl.load(output_at, mask=inside, other=0.0).to(tl.float32)
    tl.store(output_at, total.to(output_at.dtype.element_ty), mask=inside)
