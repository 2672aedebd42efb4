"""Fuses each operation between a decoder's matrices and its attention into one kernel: `FusedOps`.

The Triton kernels are bound by memory: they read and write every value once, and compute in float32. Knows no
layers.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from toka_async.kernels.activation import NAMES, activate
from toka_async.kernels.few_rows import ADD, STORE, FewRowsProducts, Norm
from toka_async.kernels.gated import GatedProducts
from toka_async.kernels.launches.pdl import FEW_ROWS, can_follow, follow
from toka_async.kernels.launches.quick import launch_quickly
from toka_async.kernels.launches.sizes import divide_up, round_to_power
from toka_async.kernels.matmul import TunedProducts
from toka_async.kernels.rotation import compute_rotation
from toka_async.kernels.scaled_weight import ScaledOps

_NORM_CELLS = 2048  # values of a program that norms several short rows
_GATE_BLOCK = 2048


class ExpertMixing(Protocol):
    def mix(self, x: Tensor, logits: Tensor, experts: Any, residual: Tensor | None, of_all: Any = None) -> Tensor:
        """See `Ops.mix_experts`."""
        ...


class FusedOps:
    """`Ops` of contiguous [t, n] tensors on one GPU; t may be 0.

    A kernel is built once per width and dtype, for any t. products: computes products without bias; None: torch does.
    gates: computes gated products without bias, where it pays; None: product and gate are computed separately.
    few_rows: computes products of few rows, where it pays. scaled: operations with weights of 8-bit floats. experts:
    for models with experts.
    """

    compute_rotation = staticmethod(compute_rotation)

    def __init__(
        self,
        products: TunedProducts | None = None,
        gates: GatedProducts | None = None,
        few_rows: FewRowsProducts | None = None,
        scaled: ScaledOps | None = None,
        experts: ExpertMixing | None = None,
    ) -> None:
        self.products = products
        self.gates = gates
        self.few_rows = few_rows
        self.experts = experts
        self.scaled = scaled

    def add_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Returns rms_norm(residual + x) * weight and residual + x; the sum is rounded to x's dtype before the norm.

        x, residual: [t, hidden]; weight: [hidden]. Without a residual, the sum returned is `x` itself.
        """
        num_rows, hidden = x.shape
        assert x.is_contiguous()
        assert residual is None or (residual.is_contiguous() and residual.shape == x.shape)
        normed = torch.empty_like(x)
        added = x if residual is None else torch.empty_like(x)
        block = round_to_power(hidden)
        rows = max(1, _NORM_CELLS // block)
        # What is added may come from other ranks, so that a kernel of another stream is in front of this one.
        pdl = residual is None and can_follow(x)
        if num_rows:
            _add_norm[(divide_up(num_rows, rows),)](
                x,
                x if residual is None else residual,
                weight,
                normed,
                added,
                num_rows,
                eps,
                hidden=hidden,
                has_residual=residual is not None,
                rows=rows,
                block=block,
                pdl=pdl,
                num_warps=min(16, max(4, block // 1024)),
                launch_pdl=pdl,
            )
        return normed, added

    def sum_squares(self, x: Tensor) -> Tensor:
        """[t, n] to float32 [t], each row in one order; torch's order depends on the number of rows."""
        num_rows, size = x.shape
        assert x.stride(1) == 1
        sums = x.new_empty(num_rows, dtype=torch.float32)
        block = round_to_power(size)
        if num_rows:
            _sum_squares[(num_rows,)](
                x, x.stride(0), sums, size=size, block=block, num_warps=min(16, max(4, block // 1024))
            )
        return sums

    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        assert gate_up.is_contiguous()
        assert activation in NAMES, activation
        num_rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
        output = gate_up.new_empty(num_rows, inner)
        block, pdl = min(_GATE_BLOCK, round_to_power(inner)), can_follow(gate_up)
        if num_rows:
            _gate[(num_rows, divide_up(inner, block))](
                gate_up,
                output,
                inner=inner,
                activation=activation,
                block=block,
                pdl=pdl,
                num_warps=4,
                launch_pdl=pdl,
            )
        return output

    def apply_gates(self, x: Tensor, gates: Tensor) -> Tensor:
        """Multiplies in place. A token's gates are contiguous. Their sigmoid is rounded to the dtype, as torch does."""
        num_tokens, width = x.shape
        assert x.is_contiguous()
        assert gates.shape == x.shape
        assert gates.stride(1) == 1
        block, pdl = min(_GATE_BLOCK, round_to_power(width)), can_follow(x)
        if num_tokens:
            _apply_gates[(num_tokens, divide_up(width, block))](
                x,
                gates,
                gates.stride(0),
                width=width,
                block=block,
                pdl=pdl,
                num_warps=4,
                launch_pdl=pdl,
            )
        return x

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, norm: Norm | None = None) -> Tensor:
        output = self._compute_few(STORE, x, weight, bias, norm=norm)
        if output is not None:
            return output
        if norm is not None:
            return self.linear(self.add_norm(x, None, *norm)[0], weight, bias)
        if bias is not None or self.products is None:
            return F.linear(x, weight, bias)
        return self.products.linear(x, weight)

    def gated_linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, norm: Norm | None = None
    ) -> Tensor:
        output = self._compute_few(activation, x, weight, bias, norm=norm)
        if output is None and norm is not None:
            return self.gated_linear(self.add_norm(x, None, *norm)[0], weight, bias, activation)
        if output is None and bias is None and self.gates is not None:
            output = self.gates.compute(x, weight, activation)
        if output is not None:
            return output
        return self.gate(self.linear(x, weight, bias), activation)

    def add_linear(
        self, residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor | None, Tensor]:
        """Adds x Wᵀ to the residual as the product is written, which halves the reads of the norm after it."""
        if bias is not None:
            return self.linear(x, weight, bias), residual
        if self._compute_few(ADD, x, weight, None, residual) is not None:
            return None, residual
        if self.products is None:
            return None, residual.addmm_(x, weight.t())
        return None, self.products.add(residual, x, weight)

    def mix_experts(
        self, x: Tensor, logits: Tensor, experts: Any, residual: Tensor | None, of_all: Any = None
    ) -> Tensor:
        assert self.experts is not None
        return self.experts.mix(x, logits, experts, residual, of_all)

    def _compute_few(
        self,
        finish: str,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        output: Tensor | None = None,
        norm: Norm | None = None,
    ) -> Tensor | None:
        if self.few_rows is None or x.shape[0] > FEW_ROWS:
            return None
        return self.few_rows.compute(finish, x, weight, bias, output, norm)


@launch_quickly
@triton.jit(do_not_specialize=["num_rows"])
def _add_norm(
    x_at,
    residual_at,
    weight_at,
    normed_at,
    added_at,
    num_rows,
    eps,
    hidden: tl.constexpr,
    has_residual: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    pdl: tl.constexpr,
):
    """One program norms `rows` rows of `hidden` values, padded to `block`."""
    follow(pdl)
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    column = tl.arange(0, block)
    within = (row < num_rows)[:, None] & (column < hidden)[None, :]
    cells = row[:, None] * hidden + column[None, :]
    x = tl.load(x_at + cells, mask=within, other=0.0)
    if has_residual:
        x = (x.to(tl.float32) + tl.load(residual_at + cells, mask=within, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(added_at + cells, x, mask=within)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / hidden + eps)
    weight = tl.load(weight_at + column, mask=column < hidden, other=0.0).to(tl.float32)
    normed = wide * scale[:, None] * weight[None, :]
    tl.store(normed_at + cells, normed.to(x.dtype), mask=within)


@launch_quickly
@triton.jit(do_not_specialize=["stride"])  # which differs between one row and several
def _sum_squares(x_at, stride, sums_at, size: tl.constexpr, block: tl.constexpr):
    """One program sums one row of `size` values, padded to `block`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    x = tl.load(x_at + row * stride + column, mask=column < size, other=0.0).to(tl.float32)
    tl.store(sums_at + row, tl.sum(x * x, 0))


@launch_quickly
@triton.jit
def _gate(
    gate_up_at,
    output_at,
    inner: tl.constexpr,
    activation: tl.constexpr,
    block: tl.constexpr,
    pdl: tl.constexpr,
):
    """One program gates `block` values of one row."""
    follow(pdl)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    within = column < inner
    gate_at = gate_up_at + row * (2 * inner) + column
    gate = tl.load(gate_at, mask=within, other=0.0)
    up = tl.load(gate_at + inner, mask=within, other=0.0).to(tl.float32)
    tl.store(
        output_at + row * inner + column, activate(gate.to(tl.float32), up, activation).to(gate.dtype), mask=within
    )


@launch_quickly
@triton.jit
def _apply_gates(
    x_at,
    gates_at,
    stride,
    width: tl.constexpr,
    block: tl.constexpr,
    pdl: tl.constexpr,
):
    """One program scales `block` values of one token."""
    follow(pdl)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    within = column < width
    x = tl.load(x_at + token * width + column, mask=within, other=0.0)
    gate = tl.load(gates_at + token * stride + column, mask=within, other=0.0)
    share = tl.sigmoid(gate.to(tl.float32)).to(x.dtype).to(tl.float32)
    tl.store(x_at + token * width + column, (x.to(tl.float32) * share).to(x.dtype), mask=within)
