"""Matrices with weights of 8-bit floats (E4M3) and scales, as checkpoints have them or made as weights are loaded.

Where a GPU has no kernels for them, and on CPUs, weights are dequantized for each product, and inputs stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from toka_async.checkpoint.matrix_spec import MatrixSpec
from toka_async.checkpoint.quantization import FORMATS, Quantization
from toka_async.kernels.scaled_weight import BLOCK, Quantized, ScaledWeight
from toka_async.model.matrices.matrix import Matrix, Rows
from toka_async.model.matrices.ops import Norm, Ops
from toka_async.model.matrices.part import WeightPart, make_unset
from toka_async.model.matrices.pieces import list_pieces
from toka_async.model.matrices.scaling import FP8, dequantize, quantize
from toka_async.model.matrices.share import JoinedShare, Share, whole_of

_LINE = 4  # scales that a row of blocks has a multiple of, as cuBLASLt reads them


class Fp8Matrix(nn.Module):
    """A `Matrix` [n, k] whose scales are by output or by block, see `Quantization`.

    It takes few rows as they are, and others quantized where there are kernels for that.
    """

    def __init__(self, spec: MatrixSpec, outputs: Sequence[Share], inputs: Share, ops: Ops) -> None:
        """outputs: the rank's part of each of the checkpoint's matrices; by blocks these are whole ones."""
        super().__init__()
        self.spec = spec
        self.ops = ops
        self.outputs = outputs
        self.inputs = inputs
        self.dtype = torch.get_default_dtype()
        self.quantization = FORMATS[spec.format]
        self.by_block = self.quantization.scaling == "block"
        n, k = sum(share.size for share in outputs), inputs.size
        shape = (n // BLOCK, -(-k // BLOCK // _LINE) * _LINE) if self.by_block else (n,)
        self.weight = nn.Parameter(torch.empty(n, k, dtype=FP8), requires_grad=False)
        self.scales = nn.Parameter(torch.zeros(shape, dtype=torch.float32), requires_grad=False)
        self.bias = make_unset(n) if spec.bias else None
        self.scaled = ScaledWeight(self.weight.data, self.scales.data)

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self.weight.shape
        return n, k

    @property
    def plain(self) -> None:
        return None

    def take(self, x: Tensor) -> Rows:
        return Rows(x)  # the product quantizes them

    def norm(self, x: Tensor, residual: Tensor | None, norm: Norm) -> tuple[Rows, Tensor]:
        kernels = self.ops.scaled
        if kernels is None or len(x) <= kernels.most_few:
            normed, total = self.ops.add_norm(x, residual, *norm)
            return Rows(normed), total
        rows, total = kernels.quantize_norm(x, residual, norm, self.by_block)
        return Rows(*rows), total

    def gate(self, gate_up: Tensor, activation: str) -> Rows:
        kernels = self.ops.scaled
        if kernels is None or len(gate_up) <= kernels.most_few:
            return Rows(self.ops.gate(gate_up, activation))
        return Rows(*kernels.quantize_gate(gate_up, activation, self.by_block))

    def product(self, rows: Rows, with_bias: bool = True) -> Tensor:
        kernels, bias = self.ops.scaled, self.bias if with_bias else None
        if kernels is None:
            return self.ops.linear(rows.values, self.dequantize(), bias, rows.norm)
        output = None
        if rows.scales is None:
            output = kernels.compute_few("store", rows.values, self.scaled, bias, norm=rows.norm)
        return kernels.linear(self._quantize(rows), self.scaled, self.dtype, bias) if output is None else output

    def gated(self, rows: Rows, activation: str, consumer: Matrix) -> Rows:
        kernels = self.ops.scaled
        if kernels is None:
            values = rows.values, self.dequantize(), self.bias, activation, rows.norm
            return consumer.take(self.ops.gated_linear(*values))
        output = None
        if rows.scales is None:
            output = kernels.compute_few(activation, rows.values, self.scaled, self.bias, norm=rows.norm)
        if output is None:
            rows = Rows(*self._quantize(rows))
            if self.bias is None:
                output = kernels.gated_linear(self._quantize(rows), self.scaled, self.dtype, activation)
        return consumer.gate(self.product(rows), activation) if output is None else consumer.take(output)

    def add(self, residual: Tensor, rows: Rows) -> tuple[Tensor | None, Tensor]:
        kernels = self.ops.scaled
        if kernels is None:
            return self.ops.add_linear(residual, rows.values, self.dequantize(), self.bias)
        if self.bias is not None:
            return self.product(rows), residual
        if rows.scales is None and kernels.compute_few("add", rows.values, self.scaled, output=residual) is not None:
            return None, residual
        return kernels.add(residual, self._quantize(rows), self.scaled)

    def _quantize(self, rows: Rows) -> Quantized:
        kernels = self.ops.scaled
        assert kernels is not None
        if rows.scales is not None:
            return rows.values, rows.scales
        if rows.norm is not None:
            return kernels.quantize_norm(rows.values, None, rows.norm, self.by_block)[0]
        return kernels.quantize(rows.values, self.by_block)

    def dequantize(self) -> Tensor:
        """Returns what the weight stands for, [n, k] of the model's dtype."""
        if self.by_block:
            return dequantize(self.weight, self.scales, BLOCK, BLOCK, self.dtype)
        return dequantize(self.weight, self.scales[:, None], 1, self.shape[1], self.dtype)

    def parts(self) -> Iterator[tuple[str, WeightPart]]:
        for piece in list_pieces(self.spec, self.outputs):
            rows, values = piece.rows, self.weight.data[piece.rows]
            blocks = slice(rows.start // BLOCK, rows.stop // BLOCK)
            scales = self.scales.data[blocks] if self.by_block else self.scales.data[rows, None]
            yield from list_scaled_parts(
                self.quantization, piece.name, values, scales, self.dtype, piece.share, self.inputs, piece.order
            )
            if self.bias is not None:
                yield f"{piece.name}.bias", WeightPart(self.bias.data[rows], (piece.share,), order=piece.order)


def list_scaled_parts(
    quantization: Quantization,
    name: str,
    values: Tensor,
    scales: Tensor,
    dtype: torch.dtype,
    share: Share | JoinedShare,
    inputs: Share,
    order: Tensor | None = None,
) -> Iterator[tuple[str, WeightPart]]:
    """Yields where a checkpoint's matrix goes: the rank's outputs and inputs of it.

    values: [outputs, inputs]. scales: [outputs, 1], or [output blocks, input blocks or more]. dtype: the model's.
    order: see `WeightPart`; a block keeps its rows, but may have another place.
    """
    by_block = quantization.scaling == "block"
    scale_shares = (share.divided(BLOCK), inputs.divided(BLOCK)) if by_block else (share, whole_of(1))
    if quantization.scale_name:
        yield f"{name}.weight", WeightPart(values, (share, inputs), ("F8_E4M3",), order=order)
        if quantization.scaling == "tensor":
            yield f"{name}.{quantization.scale_name}", WeightPart(scales, (whole_of(1),), constant=1.0)
            return
        scales = scales[:, : scale_shares[1].size]
        yield (
            f"{name}.{quantization.scale_name}",
            WeightPart(scales, scale_shares, constant=1.0, order=_order_blocks(order) if by_block else order),
        )
    elif by_block:
        scales = scales[:, : scale_shares[1].size]
        store = partial(_store, values, scales, BLOCK, BLOCK, slice(None))
        restore = partial(dequantize, values, scales, BLOCK, BLOCK, dtype)
        yield f"{name}.weight", WeightPart(values, (share, inputs), store=store, restore=restore, order=order)
    else:  # a channel's scale is that of all its inputs, whichever a rank has, so that ranks hold the same numbers
        store = partial(_store, values, scales, 1, inputs.total, inputs.indices)
        restore = partial(dequantize, values, scales, 1, inputs.total, dtype)
        shares, kept = (share, whole_of(inputs.total)), (share, inputs)
        yield f"{name}.weight", WeightPart(values, shares, store=store, restore=restore, kept=kept, order=order)


def _order_blocks(order: Tensor | None) -> Tensor | None:
    return None if order is None else torch.div(order[::BLOCK], BLOCK, rounding_mode="floor")


def _store(values: Tensor, scales: Tensor, rows: int, columns: int, own: slice, numbers: Tensor) -> None:
    """Quantizes numbers in tiles of rows x columns, and keeps the columns that are the rank's."""
    quantized, found = quantize(numbers.to(values.device), rows, columns)
    values.copy_(quantized[:, own])
    scales.copy_(found)
