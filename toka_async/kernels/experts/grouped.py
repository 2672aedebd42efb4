"""Products of each expert's rows with its own matrix, all in one launch whose grid does not depend on the rows.

Programs find their tiles from the ends of the experts' rows, on the device; experts without rows cost nothing. Where
the chip copies tensors by itself (compute capability 9.0), it brings the matrices. Knows matrices by their shapes only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from toka_async.kernels.activation import activate
from toka_async.kernels.gated import can_copy
from toka_async.kernels.launches.quick import launch_quickly
from toka_async.kernels.launches.sizes import divide_up, round_to_power
from toka_async.kernels.occupancy import count_resident

STORE: Final = "store"
BLOCK: Final = 128  # values of a group that share a scale: a tile's depth, and a multiple of its outputs


@dataclass(slots=True, frozen=True)
class GroupedTile:
    """The part of the output that one program computes: rows of one expert x matrix rows, `depth` inputs at a time.

    width: matrix rows; of gated products, half of them are a gate's, half its up rows. joined: a program's tiles are
    one loop, so that the inputs of the next tile come while one ends; it pays where a tile fills a multiprocessor.
    """

    rows: int
    width: int
    depth: int
    num_stages: int
    num_warps: int
    joined: bool = False


@dataclass(slots=True, frozen=True)
class GroupScales:
    """What E4M3 values are multiplied with, in float32: of tokens and matrix rows, or of groups and blocks of `BLOCK`.

    x: [t, 1], or [t, k / BLOCK] of any strides. weight: [experts, n], or [experts, n / BLOCK, k / BLOCK].
    """

    x: Tensor
    weight: Tensor

    @property
    def by_block(self) -> bool:
        return self.weight.ndim == 3


class GroupedProducts:
    """Products by our kernel on one GPU."""

    def __init__(self, copies: bool | None = None) -> None:
        """copies: the chip copies matrices by itself; None: if it can."""
        self._copies = copies
        self._resident: dict[tuple[object, ...], int] = {}  # programs that run at once

    def multiply(
        self,
        x: Tensor,
        weight: Tensor,
        ends: Tensor,
        output: Tensor,
        finish: str,
        tile: GroupedTile,
        sources: Tensor | None = None,
        per_source: int = 1,
        scales: GroupScales | None = None,
        bias: Tensor | None = None,
    ) -> None:
        """Computes x Wᵀ of each expert's rows, finished, into the same rows of the output; further rows stay unset.

        x: [r, k]; weight: [experts, n, k]; ends: int32 [experts]; output: [r, n], or [r, n / 2] if it is gated.
        finish: `STORE`, or an activation of the first half's outputs, times the second's. sources: int32 [r]; row r is
        then of x[sources[r] // per_source]. scales: of x and weight in E4M3; the output then is of another dtype.
        bias: [experts, n], of products before they are finished.
        """
        num_experts, n, k = weight.shape
        is_gated = finish != STORE
        by_block = scales is not None and scales.by_block
        outputs, columns = (n // 2, tile.width // 2) if is_gated else (n, tile.width)
        copies = can_copy_tensors(weight.device) if self._copies is None else self._copies
        copies = copies and can_copy(weight.flatten(0, 1))
        assert not by_block or (tile.depth == BLOCK and outputs % BLOCK == k % BLOCK == BLOCK % columns == 0)
        matrices: Any = weight
        if copies and is_gated:  # one copy brings a tile of both
            matrices = TensorDescriptor.from_tensor(weight.view(2 * num_experts, outputs, k), [2, columns, tile.depth])
        elif copies:
            matrices = TensorDescriptor.from_tensor(weight, [1, columns, tile.depth])
        most_tiles = min(len(output), divide_up(len(output), tile.rows) + num_experts)
        use = (tile, finish, weight.shape, weight.dtype)
        most = most_tiles * divide_up(outputs, columns)
        kernel = _multiply[(min(self._resident.get(use, most), most),)](
            x,
            matrices,
            ends,
            sources,
            output,
            None if scales is None else scales.x,
            None if scales is None else scales.weight,
            bias,
            0 if scales is None else scales.x.stride(0),
            0 if scales is None else scales.x.stride(1),
            per_source=per_source,
            by_block=by_block,
            num_experts=num_experts,
            outputs=outputs,
            k=k,
            finish=finish,
            copies=copies,
            rows=tile.rows,
            columns=columns,
            depth=tile.depth,
            block=round_to_power(num_experts),
            stages=tile.num_stages,
            joined=tile.joined,
            num_warps=tile.num_warps,
        )
        if use not in self._resident and weight.is_cuda:
            self._resident[use] = count_resident(kernel, weight.device)


@cache
def can_copy_tensors(device: torch.device) -> bool:
    """Tells whether the chip copies tensors by itself, since compute capability 9.0."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@launch_quickly
@triton.jit(do_not_specialize=["token_stride", "group_stride"])
def _multiply(
    x_at,
    weight,
    ends_at,
    sources_at,
    output_at,
    x_scales_at,
    scales_at,
    bias_at,
    token_stride,
    group_stride,
    per_source: tl.constexpr,
    by_block: tl.constexpr,
    num_experts: tl.constexpr,
    outputs: tl.constexpr,
    k: tl.constexpr,
    finish: tl.constexpr,
    copies: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
    block: tl.constexpr,
    stages: tl.constexpr,
    joined: tl.constexpr,
):
    """One program: every so-manieth tile. Tiles of the same rows are next to each other."""
    is_gated: tl.constexpr = finish != "store"
    matrices: tl.constexpr = 2 if is_gated else 1
    column_tiles: tl.constexpr = (outputs + columns - 1) // columns
    expert = tl.arange(0, block)
    is_expert = expert < num_experts
    ends = tl.load(ends_at + expert, mask=is_expert, other=0)
    starts = tl.load(ends_at + expert - 1, mask=is_expert & (expert > 0), other=0)
    tiles = tl.where(is_expert, (ends - starts + rows - 1) // rows, 0)
    tile_ends = tl.cumsum(tiles, 0)
    inputs = tl.arange(0, depth)
    width = tl.arange(0, matrices * columns)
    num_tiles = tl.sum(tiles, 0) * column_tiles
    for number in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=joined):
        tile = number // column_tiles
        first_column = number % column_tiles * columns
        own = tl.sum((tile_ends <= tile).to(tl.int32), 0)
        first = tl.sum(tl.where(expert == own, starts + (tile - tile_ends + tiles) * rows, 0), 0)
        last = tl.sum(tl.where(expert == own, ends, 0), 0)
        row = first + tl.arange(0, rows)
        # What lies beyond the ends is computed from the first row or column, and not stored.
        source = tl.where(row < last, row, first)
        if sources_at is not None:
            source = tl.load(sources_at + source) // per_source
        x_row_scales_at = x_scales_at
        if x_scales_at is not None:
            x_row_scales_at += source.to(tl.int64) * token_stride
        rows_at = x_at + source.to(tl.int64)[:, None] * k + inputs[None, :]
        if copies:  # all of a gate's rows before its up rows
            inner, half = first_column + width % columns, width // columns
        else:  # a gate's row and its up row side by side
            inner, half = first_column + width // matrices, width % matrices
        column = tl.where(inner < outputs, inner, 0) + half * outputs
        if not copies:
            weights_at = weight + (own.to(tl.int64) * matrices * outputs + column)[:, None] * k + inputs[None, :]
        own_scales_at = scales_at
        if by_block:  # a tile's columns are within a block
            block_columns: tl.constexpr = k // depth
            block_rows: tl.constexpr = outputs // depth
            own_scales_at += own.to(tl.int64) * matrices * block_rows * block_columns
            own_scales_at += first_column // depth * block_columns
        elif scales_at is not None:
            own_scales_at += own.to(tl.int64) * matrices * outputs + column
        total = tl.zeros((rows, matrices * columns), tl.float32)
        for begin in tl.range(0, k, depth, num_stages=stages):
            if k % depth:
                is_input = inputs[None, :] < k - begin
                part_x = tl.load(rows_at + begin, mask=is_input, other=0.0)
            else:
                part_x = tl.load(rows_at + begin)
            if copies:
                part_w = weight.load([own * matrices, first_column, begin]).reshape(matrices * columns, depth)
            elif k % depth:
                part_w = tl.load(weights_at + begin, mask=is_input, other=0.0)
            else:
                part_w = tl.load(weights_at + begin)
            if by_block:
                group = begin // depth
                factors = tl.load(own_scales_at + group)
                if is_gated:
                    of_up = tl.load(own_scales_at + block_rows * block_columns + group)
                    factors = tl.where(half == 0, factors, of_up)[None, :]
                total += tl.dot(part_x, part_w.T) * (tl.load(x_row_scales_at + group * group_stride)[:, None] * factors)
            else:
                total = tl.dot(part_x, part_w.T, total, input_precision="ieee")
        if x_scales_at is not None and not by_block:
            total *= tl.load(x_row_scales_at)[:, None] * tl.load(own_scales_at)[None, :]
        if bias_at is not None:
            total += tl.load(bias_at + own.to(tl.int64) * matrices * outputs + column)[None, :].to(tl.float32)
        if is_gated:
            if copies:
                gate, up = total.reshape(rows, 2, columns).permute(0, 2, 1).split()
            else:
                gate, up = total.reshape(rows, columns, 2).split()
            total = activate(gate, up, finish)
        column = first_column + tl.arange(0, columns)
        cells = row.to(tl.int64)[:, None] * outputs + column[None, :]
        within = (row < last)[:, None] & (column < outputs)[None, :]
        tl.store(output_at + cells, total.to(output_at.dtype.element_ty), mask=within)
