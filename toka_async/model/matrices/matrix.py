"""What a decoder needs of a matrix, whatever format its weights have: `Matrix`, and its input: `Rows`.

Knows no format and no layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from toka_async.checkpoint.matrix_spec import MatrixSpec
from toka_async.model.matrices.ops import Norm
from toka_async.model.matrices.part import WeightPart


@dataclass(slots=True)
class Rows:
    """The input of a matrix, as the matrix takes it.

    values: [t, inputs]. scales: of quantized values; their first dimension is the tokens. norm: of the values, which is
    left to the product.
    """

    values: Tensor
    scales: Tensor | None = None
    norm: Norm | None = None


class Matrix(Protocol):
    """A rank's part of a `MatrixSpec`: an nn.Module. n, k: the outputs and inputs of the part.

    The matrix that takes values decides on their form, so `take`, `norm` and `gate` make its input; only its own
    products read it.
    """

    @property
    def spec(self) -> MatrixSpec:
        """The whole of it."""
        ...

    @property
    def shape(self) -> tuple[int, int]:
        """Returns n and k."""
        ...

    @property
    def bias(self) -> Tensor | None:
        """[n]."""
        ...

    @property
    def plain(self) -> Tensor | None:
        """[n, k] of the model's dtype, for those who multiply by themselves with plain rows; None: it has none."""
        ...

    def take(self, x: Tensor) -> Rows:
        """[t, k]."""
        ...

    def norm(self, x: Tensor, residual: Tensor | None, norm: Norm) -> tuple[Rows, Tensor]:
        """Takes the norm of the residual after `x` is added to it, [t, k] each; also returns the sum.

        A residual of None counts as zeros.
        """
        ...

    def gate(self, gate_up: Tensor, activation: str) -> Rows:
        """Takes the first half's activation times the second half of [t, 2 * k]."""
        ...

    def product(self, rows: Rows, with_bias: bool = True) -> Tensor:
        """[t, k] to [t, n] of the model's dtype: x Wᵀ + b."""
        ...

    def gated(self, rows: Rows, activation: str, consumer: Matrix) -> Rows:
        """[t, k] to the [t, n / 2] that `consumer` takes: its `gate` of `product`."""
        ...

    def add(self, residual: Tensor, rows: Rows) -> tuple[Tensor | None, Tensor]:
        """Returns x Wᵀ + b [t, n], which is yet to be added to the residual, and the residual.

        The first is None if it was added to the residual in place.
        """
        ...

    def parts(self) -> Iterator[tuple[str, WeightPart]]:
        """Yields the tensors of a checkpoint by their names in the layer."""
        ...


@dataclass(slots=True, frozen=True)
class MatrixUse:
    """How steps use a matrix, on which its fastest product depends.

    activation: of a product that is gated. adds: the product is added to the residual in place. normed: the dtype of
    the factors of the input's norm, if that norm is left to the product; otherwise None. of_samples: only rows that are
    sampled are multiplied.
    """

    matrix: Matrix
    activation: str | None = None
    adds: bool = False
    normed: torch.dtype | None = None
    of_samples: bool = False
