"""Products of a matrix with at most 16 rows: reading the weights takes all the time.

A program computes some columns of the output over all inputs, so nothing is summed between programs. Before it waits
for the kernel in front of it, it has the L2 cache fetch its weights, which no kernel writes: memory is busy while
kernels change, as in CUTLASS' example 63. Weights of 8-bit floats are read as such, and multiplied with x as it is.
`tuning.few_rows` chooses where it is used. Knows matrices by their shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from toka_async.kernels.activation import NAMES, activate
from toka_async.kernels.by_rows import ByRows
from toka_async.kernels.launches.pdl import can_follow, follow
from toka_async.kernels.launches.quick import launch_quickly
from toka_async.kernels.scaled_weight import BLOCK, ScaledWeight, Weight, split_weight

STORE: Final = "store"
ADD: Final = "add"  # to what the output holds
FINISHES = (STORE, ADD, *NAMES)  # the last: a gate's activation times up
Norm = tuple[Tensor, float]  # an RMSNorm's weight and epsilon
NORMED_DTYPES = (torch.bfloat16,)  # that hold x times the weight alone, whatever x is
_ALIGNMENT = 16  # bytes
_LINE = 64  # bytes that memory sends to the L2 cache at least


@dataclass(slots=True, frozen=True)
class FewRowsTile:
    """rows: 1, multiplied by threads, or 16, by matrix units. columns: outputs of a program. depth: inputs at a time.

    num_stages: how many times the depth is on its way at once. num_ahead: how many depths later the weights are that
    the L2 cache fetches meanwhile, where threads multiply; casts of 8-bit floats take so long that memory would wait.
    """

    rows: int
    columns: int
    depth: int
    num_stages: int
    num_warps: int
    num_ahead: int = 0


@dataclass(slots=True, frozen=True)
class _Use:
    n: int
    k: int
    dtype: torch.dtype
    finish: str


class FewRowsProducts:
    """Products of up to 16 rows by our kernel, for the shapes and numbers of rows that it was chosen for."""

    def __init__(self, fetched_bytes: int, num_programs: int) -> None:
        """fetched_bytes: of weights that may wait in the L2 cache for `num_programs`, which about run at once."""
        self._fetched_bytes = fetched_bytes
        self._num_programs = num_programs
        self._chosen: dict[_Use, ByRows[FewRowsTile | None]] = {}

    def use(self, weight: Weight, finish: str, sizes: Sequence[int], tiles: Sequence[FewRowsTile | None]) -> None:
        """From now on the i-th tile computes up to sizes[i] rows, in ascending order; None: not our kernel."""
        self._chosen[_describe(weight, finish)] = ByRows(list(sizes), list(tiles))

    def compute(
        self,
        finish: str,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None = None,
        output: Tensor | None = None,
        norm: Norm | None = None,
    ) -> Tensor | None:
        """Computes x Wᵀ + b, finished, from x [t, k] and W [n, k] into output [t, n], or [t, n / 2] if it is gated.

        Returns None, with nothing done, where our kernel was not chosen. output: what is added to; None: a new one.
        norm: of x, before; weight [k].
        """
        chosen = self._chosen.get(_describe(weight, finish))
        tile = None if chosen is None else chosen.find(x.shape[0])
        if tile is None or not _can_read(x, weight) or (norm is not None and x.dtype not in NORMED_DTYPES):
            return None
        if output is None:
            output = x.new_empty(x.shape[0], weight.shape[0] // (1 if finish in (STORE, ADD) else 2))
        assert output.is_contiguous()
        self.run(finish, tile, x, weight, output, bias, norm)
        return output

    def can_run(self, finish: str, tile: FewRowsTile, x: Tensor, weight: Weight) -> bool:
        """Tells whether a tile divides the matrix and its blocks of scales, and holds the rows."""
        n, k = weight.shape
        whole = n % (tile.columns if finish in (STORE, ADD) else 2 * tile.columns) == 0 and k % tile.depth == 0
        if isinstance(weight, ScaledWeight) and weight.by_block:
            whole = whole and (tile.depth % BLOCK == 0 if tile.rows == 1 else tile.depth == BLOCK)
        return whole and 0 < len(x) <= tile.rows and _can_read(x, weight)

    def run(
        self,
        finish: str,
        tile: FewRowsTile,
        x: Tensor,
        weight: Weight,
        output: Tensor,
        bias: Tensor | None = None,
        norm: Norm | None = None,
    ) -> None:
        """Computes by a tile that can run; the first call of a tile compiles it."""
        values, scales, block_stride = split_weight(weight)
        n, k = values.shape
        gated = finish not in (STORE, ADD)
        num_rows, pdl = x.shape[0], can_follow(x)
        num_weights = tile.columns * (2 if gated else 1)  # rows of the matrix that a program reads
        norm_weight, eps = norm or (None, 0.0)
        num_programs = n // num_weights
        row_bytes = self._fetched_bytes // (min(num_programs, self._num_programs) * num_weights)
        _product[(num_programs,)](
            x,
            values,
            scales,
            bias,
            norm_weight,
            output,
            num_rows,
            eps,
            n=n,
            k=k,
            block_stride=block_stride,
            block=BLOCK,
            finish=finish,
            has_bias=bias is not None,
            has_norm=norm is not None,
            rows=tile.rows,
            columns=tile.columns,
            depth=tile.depth,
            stages=tile.num_stages,
            ahead=tile.num_ahead,
            pdl=pdl,
            fetched=_round_down(min(row_bytes, k * values.itemsize) // _LINE),
            num_warps=tile.num_warps,
            launch_pdl=pdl,
        )


def _describe(weight: Weight, finish: str) -> _Use:
    n, k = weight.shape
    return _Use(n, k, weight.dtype, finish)


def _round_down(count: int) -> int:
    """Returns the largest power of two that is no larger; 0 for 0."""
    return 1 << (count.bit_length() - 1) if count else 0


def _can_read(x: Tensor, weight: Weight) -> bool:
    return all(each.is_contiguous() and each.data_ptr() % _ALIGNMENT == 0 for each in (x, split_weight(weight)[0]))


@launch_quickly
@triton.jit(do_not_specialize=["num_rows"])
def _product(
    x,
    weight,
    scales,
    bias,
    norm_weight,
    output,
    num_rows,
    eps,
    n: tl.constexpr,
    k: tl.constexpr,
    block_stride: tl.constexpr,
    block: tl.constexpr,
    finish: tl.constexpr,
    has_bias: tl.constexpr,
    has_norm: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
    stages: tl.constexpr,
    ahead: tl.constexpr,
    pdl: tl.constexpr,
    fetched: tl.constexpr,
):
    """One program computes `columns` columns. fetched: lines of each row of weights that are fetched ahead."""
    by_block: tl.constexpr = block_stride > 0
    is_gated: tl.constexpr = finish != "store" and finish != "add"
    value_bytes: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
    first = tl.program_id(0) * columns
    if is_gated:  # a gate's row and its up row side by side
        number = tl.arange(0, 2 * columns)
        source = first + number // 2 + number % 2 * (n // 2)
    else:
        source = first + tl.arange(0, columns)
    weights_at = weight + source.to(tl.int64)[:, None] * k
    if pdl and fetched > 0:
        _fetch(weights_at.to(tl.int64) + (tl.arange(0, fetched) * 64)[None, :])
    follow(pdl)

    row = tl.arange(0, rows)
    is_row = row < num_rows
    within = tl.arange(0, depth)
    if rows == 1:
        # x as large as the weights, so that it lies in threads as they do: nothing is exchanged in the loop.
        if by_block:  # dimensions more: blocks, which have a scale each, and runs of inputs that a thread sums first
            group = tl.arange(0, depth // block)
            start = group[None, :, None, None] * block + tl.arange(0, block // 16)[None, None, :, None] * 16
            cell = start + tl.arange(0, 16)[None, None, None, :]
            each = tl.zeros_like(source)[:, None, None, None] + cell
            lines = weights_at[:, :, None, None]
            scales_at = scales + (source // block * block_stride)[:, None, None] + group[None, :, None]
            products = tl.zeros([source.shape[0], depth // block, block // 16], tl.float32)
        else:
            cell = within[None, :]
            each = tl.zeros_like(source)[:, None] + cell
            lines = weights_at
            products = tl.zeros(each.shape, tl.float32)
        squares = tl.zeros([depth], tl.float32)
        if ahead > 0:
            next_lines = weights_at.to(tl.int64) + (tl.arange(0, depth * value_bytes // 64) * 64)[None, :]
        for begin in tl.range(0, k, depth, loop_unroll_factor=stages):
            if ahead > 0:
                _fetch(next_lines + tl.minimum(begin + ahead * depth, k - depth) * value_bytes)
            part_x = tl.load(x + begin + each).to(tl.float32)
            part_w = tl.load(lines + begin + cell).to(tl.float32)
            if has_norm:
                once = tl.load(x + begin + within).to(tl.float32)
                squares += once * once
                part_x *= tl.load(norm_weight + begin + each).to(tl.float32)
            if by_block:
                products += tl.sum(part_w * part_x, 3) * tl.load(scales_at + begin // block)
            else:
                products += part_w * part_x
        if by_block:
            products = tl.sum(products, 2)
        result = tl.sum(products, 1)
        if has_norm:
            result *= tl.rsqrt(tl.sum(squares) / k + eps)
        result = result[None, :]
    else:
        result = tl.zeros([rows, source.shape[0]], tl.float32)
        total = tl.zeros([rows], tl.float32)
        for begin in tl.range(0, k, depth, num_stages=stages):
            part_x = tl.load(x + row[:, None] * k + begin + within[None, :], mask=is_row[:, None], other=0.0)
            part_w = tl.load(weights_at + begin + within[None, :])
            if has_norm:  # a row's factor is known once all of the row has been read
                wide = part_x.to(tl.float32)
                total += tl.sum(wide * wide, 1)
                part_x = (wide * tl.load(norm_weight + begin + within[None, :]).to(tl.float32)).to(part_x.dtype)
            if scales is not None:  # the way over float32 takes fewer instructions than the direct one
                part_w = part_w.to(tl.float32)
            part_w = part_w.to(part_x.dtype)
            if by_block:
                part_scales = tl.load(scales + source // block * block_stride + begin // block)
                result += tl.dot(part_x, part_w.T) * part_scales[None, :]
            else:
                result = tl.dot(part_x, part_w.T, result)
        if has_norm:
            result *= tl.rsqrt(total / k + eps)[:, None]

    if scales is not None and not by_block:
        result *= tl.load(scales + source)[None, :]
    if has_bias:
        result += tl.load(bias + source).to(tl.float32)[None, :]
    column = first + tl.arange(0, columns)
    if is_gated:
        gate, up = result.reshape(rows, columns, 2).split()
        result = activate(gate, up, finish)
        place = output + row[:, None] * (n // 2) + column[None, :]
    else:
        place = output + row[:, None] * n + column[None, :]
    if finish == "add":
        result += tl.load(place, mask=is_row[:, None], other=0.0).to(tl.float32)
    tl.store(place, result.to(output.dtype.element_ty), mask=is_row[:, None])


@triton.jit
def _fetch(address):
    """Has the L2 cache fetch the lines of these addresses."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // dummy $0", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )
