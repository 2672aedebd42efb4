"""How a step's activations lie on the tensor ranks between matrices, and what that makes of a matrix product.

`Replicated`: every rank has the activations of all tokens, and the ranks' partial sums are all-reduced.
`SequenceSharded`: each rank has those of its share of the tokens (sequence parallelism, arXiv:2205.05198), so norms and
residual are a share of the work; a column-parallel matrix gathers tokens, a row-parallel one scatters them. Knows no
layers.

t: tokens of a step. u: tokens whose activations a rank has, all t or the rank's share. `SequenceSharded` pads t to v, a
multiple of the ranks; the padding's activations are finite and unused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from toka_async.model.comm import Comm
from toka_async.model.ops import Ops

# (x [t, k], W [n, k], b [n]) -> x Wᵀ + b.
Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]


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

    def column_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, linear: Linear = F.linear) -> Tensor:
        """[u, inputs] to [v, the rank's outputs]: x Wᵀ + b. `linear` computes products that stand alone."""
        ...

    def gated_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, ops: Ops) -> Tensor:
        """[u, inputs] to [v, the rank's half of the outputs]: `column_linear`, then the gate of `Ops.gated_linear`."""
        ...

    def row_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, linear: Linear = F.linear) -> Tensor:
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

    def column_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, linear: Linear = F.linear) -> Tensor:
        return linear(x, weight, bias)

    def gated_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, ops: Ops) -> Tensor:
        return ops.gated_linear(x, weight, bias, activation)

    def row_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, linear: Linear = F.linear) -> Tensor:
        once = bias if self.comm.rank == 0 else None  # the sum must have it once
        return self.comm.all_reduce(linear(x, weight, once))


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

    def column_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, linear: Linear = F.linear) -> Tensor:
        return linear(self.comm.all_gather(x, 0), weight, bias)

    def gated_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, ops: Ops) -> Tensor:
        return ops.gated_linear(self.comm.all_gather(x, 0), weight, bias, activation)

    def row_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, linear: Linear = F.linear) -> Tensor:
        output = self.comm.reduce_scatter(linear(x, weight, None))
        return output if bias is None else output + bias


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
