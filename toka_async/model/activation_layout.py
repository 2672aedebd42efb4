"""How a step's activations lie on the tensor ranks between matrices, and what that makes of a matrix product.

`Replicated`: every rank has the activations of all tokens, and the ranks' partial sums are all-reduced.
`SequenceSharded`: each rank has those of its share of the tokens (sequence parallelism, arXiv:2205.05198), so norms and
residual are a share of the work; a column-parallel matrix gathers tokens, a row-parallel one scatters them. Knows no
layers.

t: tokens of a step. u: tokens whose activations a rank has, all t or the rank's share. `SequenceSharded` pads t to v, a
multiple of the ranks; the padding's activations are finite and unused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from toka_async.model.comm import Comm
from toka_async.model.matrices.matrix import Matrix, Rows


class ActivationLayout(Protocol):
    @property
    def replicated(self) -> ActivationLayout: ...

    def pad(self, x: Tensor) -> Tensor:
        """[t, n] to [v, n]; the padding's rows have any values."""
        ...

    def take_own(self, x: Tensor) -> Tensor:
        """[t, n] to [u, n]."""
        ...

    def trim(self, x: Tensor, num_tokens: int) -> Tensor:
        """[v, n] to [t, n]."""
        ...

    def reduce(self, x: Tensor) -> Tensor:
        """Sums [v, n] over ranks into [u, n]; may overwrite `x`."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """[u, n] to [v, n], the same on every rank."""
        ...

    def column(self, rows: Rows, matrix: Matrix) -> Tensor:
        """[u, inputs] to [v, the rank's outputs]: x Wᵀ + b."""
        ...

    def gated(self, rows: Rows, matrix: Matrix, activation: str, consumer: Matrix) -> Rows:
        """[u, inputs] to [v, the rank's half of the outputs], as `consumer` takes it: `Matrix.gated`."""
        ...

    def row(self, rows: Rows, matrix: Matrix, residual: Tensor) -> tuple[Tensor | None, Tensor]:
        """Adds `sum` to the residual in place, or returns it. See `Matrix.add`."""
        ...

    def sum(self, rows: Rows, matrix: Matrix) -> Tensor:
        """[v, the rank's inputs] to [u, outputs]: x Wᵀ summed over ranks, + b."""
        ...


@dataclass(slots=True, frozen=True)
class Replicated:
    """Every rank has all tokens: u = v = t."""

    comm: Comm

    @property
    def replicated(self) -> ActivationLayout:
        return self

    def pad(self, x: Tensor) -> Tensor:
        return x

    def take_own(self, x: Tensor) -> Tensor:
        return x

    def trim(self, x: Tensor, num_tokens: int) -> Tensor:  # noqa: ARG002
        return x

    def reduce(self, x: Tensor) -> Tensor:
        return self.comm.all_reduce(x)

    def gather(self, x: Tensor) -> Tensor:
        return x

    def column(self, rows: Rows, matrix: Matrix) -> Tensor:
        return matrix.product(rows)

    def gated(self, rows: Rows, matrix: Matrix, activation: str, consumer: Matrix) -> Rows:
        return matrix.gated(rows, activation, consumer)

    def row(self, rows: Rows, matrix: Matrix, residual: Tensor) -> tuple[Tensor | None, Tensor]:
        if self.comm.size == 1:
            return matrix.add(residual, rows)
        return self.sum(rows, matrix), residual

    def sum(self, rows: Rows, matrix: Matrix) -> Tensor:
        # The sum must have the bias once.
        return self.comm.all_reduce(matrix.product(rows, with_bias=self.comm.rank == 0))


@dataclass(slots=True, frozen=True)
class SequenceSharded:
    """Each rank has its share of the tokens, in the order of ranks: u = v / ranks. Nothing overlaps."""

    comm: Comm

    @property
    def replicated(self) -> ActivationLayout:
        return Replicated(self.comm)

    def pad(self, x: Tensor) -> Tensor:
        missing = -len(x) % self.comm.size
        return F.pad(x, (0, 0, 0, missing)) if missing else x

    def take_own(self, x: Tensor) -> Tensor:
        return self.pad(x).chunk(self.comm.size)[self.comm.rank]

    def trim(self, x: Tensor, num_tokens: int) -> Tensor:
        return x[:num_tokens]

    def reduce(self, x: Tensor) -> Tensor:
        return self.comm.reduce_scatter(x)

    def gather(self, x: Tensor) -> Tensor:
        return self.comm.all_gather(x, 0)

    def column(self, rows: Rows, matrix: Matrix) -> Tensor:
        return matrix.product(self._gather_rows(rows))

    def gated(self, rows: Rows, matrix: Matrix, activation: str, consumer: Matrix) -> Rows:
        return matrix.gated(self._gather_rows(rows), activation, consumer)

    def row(self, rows: Rows, matrix: Matrix, residual: Tensor) -> tuple[Tensor | None, Tensor]:
        return self.sum(rows, matrix), residual

    def sum(self, rows: Rows, matrix: Matrix) -> Tensor:
        return add_bias(self.comm.reduce_scatter(matrix.product(rows, with_bias=False)), matrix)

    def _gather_rows(self, rows: Rows) -> Rows:
        if rows.scales is None:
            return Rows(self.comm.all_gather(rows.values, 0))
        values = self.comm.all_gather(rows.values.view(torch.uint8), 0)  # not every backend knows 8-bit floats
        return Rows(values.view(rows.values.dtype), self.comm.all_gather(rows.scales, 0))


def add_bias(product: Tensor, matrix: Matrix) -> Tensor:
    return product if matrix.bias is None else product + matrix.bias


@dataclass(slots=True, frozen=True)
class LayoutPolicy:
    """Chooses the layout of a step: `shards`, if any, from `min_tokens` tokens on, else `whole`."""

    whole: ActivationLayout
    shards: ActivationLayout | None = None
    min_tokens: int = 0

    def choose(self, num_tokens: int) -> ActivationLayout:
        if self.shards is None or num_tokens < self.min_tokens:
            return self.whole
        return self.shards
