"""Matrices with weights of the model's dtype, whose products are those of `Ops`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from toka_async.checkpoint.matrix_spec import MatrixSpec
from toka_async.model.matrices.matrix import Matrix, Rows
from toka_async.model.matrices.ops import Norm, Ops
from toka_async.model.matrices.part import WeightPart, make_unset
from toka_async.model.matrices.pieces import list_pieces
from toka_async.model.matrices.share import Share


class DenseMatrix(nn.Module):
    """A `Matrix` [n, k] of the model's dtype; it takes values as they are."""

    def __init__(self, spec: MatrixSpec, outputs: Sequence[Share], inputs: Share, ops: Ops) -> None:
        """outputs: the rank's part of each of the checkpoint's matrices."""
        super().__init__()
        self.spec = spec
        self.ops = ops
        self.outputs = outputs
        self.inputs = inputs
        num_rows = sum(share.size for share in outputs)
        self.weight = make_unset(num_rows, inputs.size)
        self.bias = make_unset(num_rows) if spec.bias else None

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self.weight.shape
        return n, k

    @property
    def plain(self) -> Tensor:
        return self.weight

    def take(self, x: Tensor) -> Rows:
        return Rows(x)

    def norm(self, x: Tensor, residual: Tensor | None, norm: Norm) -> tuple[Rows, Tensor]:
        normed, total = self.ops.add_norm(x, residual, *norm)
        return Rows(normed), total

    def gate(self, gate_up: Tensor, activation: str) -> Rows:
        return Rows(self.ops.gate(gate_up, activation))

    def product(self, rows: Rows, with_bias: bool = True) -> Tensor:
        return self.ops.linear(rows.values, self.weight, self.bias if with_bias else None, rows.norm)

    def gated(self, rows: Rows, activation: str, consumer: Matrix) -> Rows:
        return consumer.take(self.ops.gated_linear(rows.values, self.weight, self.bias, activation, rows.norm))

    def add(self, residual: Tensor, rows: Rows) -> tuple[Tensor | None, Tensor]:
        return self.ops.add_linear(residual, rows.values, self.weight, self.bias)

    def parts(self) -> Iterator[tuple[str, WeightPart]]:
        for piece in list_pieces(self.spec, self.outputs):
            weight, shares = self.weight.data[piece.rows], (piece.share, self.inputs)
            yield f"{piece.name}.weight", WeightPart(weight, shares, order=piece.order)
            if self.bias is not None:
                yield f"{piece.name}.bias", WeightPart(self.bias.data[piece.rows], (piece.share,), order=piece.order)
