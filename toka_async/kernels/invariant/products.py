"""Products with a model's matrices, each row of which is summed in the same order however many rows there are.

One tile computes all numbers of rows of a matrix, so a row meets the same instructions at any place in it: no split of
the inputs, and no smaller tile for few rows, as matrix instructions of other shapes may round otherwise. Knows matrices
by their shapes only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from toka_async.kernels.experts.mixture import ExpertKernels
from toka_async.kernels.few_rows import Norm
from toka_async.kernels.fp8.ops import ScaledKernels
from toka_async.kernels.fp8.products import ScaledProducts
from toka_async.kernels.fp8.scaled import LARGEST_TILE
from toka_async.kernels.fused import FusedOps
from toka_async.kernels.launches.quick import launch_quickly
from toka_async.kernels.launches.sizes import divide_up

_GROUP = 8  # row tiles that share weights in the L2 cache
_WIDE = 8192  # outputs from which on wide tiles keep a chip busy with one tile of rows


@dataclass(slots=True, frozen=True)
class ProductTile:
    """The part of the output that one program computes: rows x columns, with `depth` inputs at a time."""

    rows: int
    columns: int
    depth: int
    num_stages: int
    num_warps: int


def choose_tile(num_outputs: int, dtype: torch.dtype) -> ProductTile:
    """Chooses the one tile of a matrix. It takes at most 96 KiB of shared memory, which all chips since Ampere have.

    Few rows read the weights in as many programs as there are tiles of columns: narrow matrices get narrow tiles.
    """
    if dtype == torch.float32:
        return ProductTile(64, 64, 32, num_stages=2, num_warps=4)
    if num_outputs < _WIDE:
        return ProductTile(128, 64, 64, num_stages=4, num_warps=8)
    return ProductTile(128, 128, 64, num_stages=3, num_warps=8)


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    tile: ProductTile | None = None,
) -> Tensor:
    """x Wᵀ + b: [t, k] and [n, k] to [t, n], summed in float32 and rounded once. Adds it to `residual` [t, n] if given.

    All tensors are contiguous. tile: for tests; None: that of `choose_tile`.
    """
    (num_rows, k), n = x.shape, len(weight)
    assert x.is_contiguous()
    assert weight.is_contiguous()
    assert residual is None or (residual.is_contiguous() and residual.shape == (num_rows, n))
    output = x.new_empty(num_rows, n) if residual is None else residual
    tile = tile or choose_tile(n, x.dtype)
    if num_rows:
        _product[(divide_up(num_rows, tile.rows) * divide_up(n, tile.columns),)](
            x,
            weight,
            bias,
            output,
            num_rows,
            n=n,
            k=k,
            adds=residual is not None,
            rows=tile.rows,
            columns=tile.columns,
            depth=tile.depth,
            group=_GROUP,
            num_stages=tile.num_stages,
            num_warps=tile.num_warps,
        )
    return output


class InvariantOps:
    """`Ops` of contiguous [t, n] tensors on one GPU. Norms and gates are those of `FusedOps`: they go by rows."""

    def __init__(self) -> None:
        fused = FusedOps()
        self.scaled = ScaledKernels(ScaledProducts(tile=LARGEST_TILE))
        self.add_norm = fused.add_norm
        self.sum_squares = fused.sum_squares
        self.gate = fused.gate
        self.apply_gates = fused.apply_gates
        self.compute_rotation = fused.compute_rotation
        self.mix_experts = ExpertKernels(invariant=True).mix

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, norm: Norm | None = None) -> Tensor:
        if norm is not None:
            x = self.add_norm(x, None, *norm)[0]
        return multiply(x.contiguous(), weight, bias)

    def gated_linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, norm: Norm | None = None
    ) -> Tensor:
        return self.gate(self.linear(x, weight, bias, norm), activation)

    def add_linear(
        self, residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor | None, Tensor]:
        return None, multiply(x.contiguous(), weight, bias, residual)


@launch_quickly
@triton.jit(do_not_specialize=["num_rows"])
def _product(
    x_at,
    weight_at,
    bias_at,
    output_at,
    num_rows,
    n: tl.constexpr,
    k: tl.constexpr,
    adds: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
    group: tl.constexpr,
):
    """One program computes one tile. adds: to what is in the output."""
    row_tiles = tl.cdiv(num_rows, rows)
    column_tiles: tl.constexpr = (n + columns - 1) // columns
    # Tiles that are computed at the same time share rows and columns.
    tile = tl.program_id(0)
    first = tile // (group * column_tiles) * group
    height = tl.minimum(row_tiles - first, group)
    row = (first + tile % (group * column_tiles) % height) * rows + tl.arange(0, rows)
    column = tile % (group * column_tiles) // height * columns + tl.arange(0, columns)
    # What lies beyond the ends is computed from the first row or column, and not stored.
    x_row = tl.where(row < num_rows, row, 0).to(tl.int64)
    weight_row = tl.where(column < n, column, 0).to(tl.int64)
    inputs = tl.arange(0, depth)
    x_at += x_row[:, None] * k + inputs[None, :]
    weight_at += weight_row[None, :] * k + inputs[:, None]
    total = tl.zeros((rows, columns), tl.float32)
    for begin in range(0, k, depth):
        if k % depth:
            x = tl.load(x_at + begin, mask=inputs[None, :] < k - begin, other=0.0)
            weight = tl.load(weight_at + begin, mask=inputs[:, None] < k - begin, other=0.0)
        else:
            x = tl.load(x_at + begin)
            weight = tl.load(weight_at + begin)
        total = tl.dot(x, weight, total, input_precision="ieee")
    inside = (row < num_rows)[:, None] & (column < n)[None, :]
    output_at += row.to(tl.int64)[:, None] * n + column[None, :]
    if bias_at is not None:
        total += tl.load(bias_at + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
    if adds:
        total += tl.load(output_at, mask=inside, other=0.0).to(tl.float32)
    tl.store(output_at, total.to(output_at.dtype.element_ty), mask=inside)
