"""The operations of a GPU on weights of 8-bit floats, each one kernel or one call of a library."""

from __future__ import annotations

import torch
from torch import Tensor

from toka_async.kernels.few_rows import FewRowsProducts, Norm
from toka_async.kernels.fp8.products import ScaledProducts
from toka_async.kernels.fp8.quantize import quantize, quantize_gate, quantize_norm
from toka_async.kernels.gated import GatedProducts, RowScales
from toka_async.kernels.launches.pdl import FEW_ROWS
from toka_async.kernels.scaled_weight import Quantized, ScaledWeight

LEAST_CAPABILITY = (8, 9)  # of a GPU that multiplies 8-bit floats


class ScaledKernels:
    """`ScaledOps` of contiguous tensors on one GPU; t may be 0.

    gates, few_rows: compute what they were chosen for; None: nothing.
    """

    def __init__(
        self,
        products: ScaledProducts,
        gates: GatedProducts | None = None,
        few_rows: FewRowsProducts | None = None,
    ) -> None:
        self.products = products
        self.gates = gates
        self.few_rows = few_rows
        self.most_few = 0 if few_rows is None else FEW_ROWS

    def quantize(self, x: Tensor, by_block: bool) -> Quantized:
        return quantize(x.contiguous(), by_block)

    def quantize_norm(self, x: Tensor, residual: Tensor | None, norm: Norm, by_block: bool) -> tuple[Quantized, Tensor]:
        return quantize_norm(x, residual, *norm, by_block)

    def quantize_gate(self, gate_up: Tensor, activation: str, by_block: bool) -> Quantized:
        return quantize_gate(gate_up, activation, by_block)

    def linear(self, rows: Quantized, weight: ScaledWeight, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
        return self.products.linear(rows, weight, dtype, bias)

    def gated_linear(self, rows: Quantized, weight: ScaledWeight, dtype: torch.dtype, activation: str) -> Tensor | None:
        if self.gates is None:
            return None
        return self.gates.compute(rows[0], weight, activation, RowScales(rows[1], dtype))

    def add(self, residual: Tensor, rows: Quantized, weight: ScaledWeight) -> tuple[Tensor | None, Tensor]:
        return self.products.add(residual, rows, weight)

    def compute_few(
        self,
        finish: str,
        x: Tensor,
        weight: ScaledWeight,
        bias: Tensor | None = None,
        output: Tensor | None = None,
        norm: Norm | None = None,
    ) -> Tensor | None:
        if self.few_rows is None or x.shape[0] > FEW_ROWS:
            return None
        return self.few_rows.compute(finish, x, weight, bias, output, norm)
