"""How a step's activations lie on the tensor ranks between matrices, and what that makes of a matrix.

`Replicated`: every rank has those of all tokens, and the ranks' partial sums are all-reduced. `SequenceSharded`: each
rank has those of its share of the tokens (sequence parallelism, arXiv:2205.05198), so that norms and residual are a
share of the work; a column-parallel matrix gathers tokens, a row-parallel one scatters them. Knows no layers.

t: tokens of a step. u: those of it that a rank's activations are of, all t or the rank's share. Shards pad t to v, a
multiple of the ranks; the padding's activations are finite and of no use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from toka_async.model.comm import Comm
from toka_async.model.ops import Ops

# From x [t, k], W [n, k] and b [n] to x Wᵀ + b.
Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class ActivationLayout(Protocol):
    """One way in which activations can lie."""

    @property
    def whole(self) -> ActivationLayout:
        """The way in which every rank has all tokens."""
        ...

    def padded(self, x: Tensor) -> Tensor:
        """[t, n] to [v, n], with any rows for the padding."""
        ...

    def own(self, x: Tensor) -> Tensor:
        """[t, n] to [u, n]."""
        ...

    def trimmed(self, x: Tensor, num_tokens: int) -> Tensor:
        """[v, n] to [t, n]."""
        ...

    def summed(self, x: Tensor) -> Tensor:
        """The sum over ranks of [v, n], [u, n]; `x` may be written over."""
        ...

    def gathered(self, x: Tensor) -> Tensor:
        """[u, n] to [v, n], the same on every rank."""
        ...

    def column(self, x: Tensor, weight: Tensor, bias: Tensor | None, linear: Linear = F.linear) -> Tensor:
        """[u, inputs] to [v, the rank's outputs]: x Wᵀ + b. linear: computes products that stand alone."""
        ...

    def gated(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, ops: Ops) -> Tensor:
        """[u, inputs] to [v, the rank's half of the outputs]: `column`, gated as in `Ops.gated_linear`."""
        ...

    def row(self, x: Tensor, weight: Tensor, bias: Tensor | None, linear: Linear = F.linear) -> Tensor:
        """[v, the rank's inputs] to [u, outputs]: the sum over ranks of x Wᵀ, + b."""
        ...


@dataclass(slots=True, frozen=True)
class Replicated:
    """Every rank has all tokens: u = v = t."""

    comm: Comm

    @property
    def whole(self) -> ActivationLayout:
        return self

    def padded(self, x: Tensor) -> Tensor:
        return x

    def own(self, x: Tensor) -> Tensor:
        return x

    def trimmed(self, x: Tensor, num_tokens: int) -> Tensor:  # noqa: ARG002
        return x

    def summed(self, x: Tensor) -> Tensor:
        return self.comm.all_reduce(x)

    def gathered(self, x: Tensor) -> Tensor:
        return x

    def column(self, x: Tensor, weight: Tensor, bias: Tensor | None, linear: Linear = F.linear) -> Tensor:
        return linear(x, weight, bias)

    def gated(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, ops: Ops) -> Tensor:
        return ops.gated_linear(x, weight, bias, activation)

    def row(self, x: Tensor, weight: Tensor, bias: Tensor | None, linear: Linear = F.linear) -> Tensor:
        once = bias if self.comm.rank == 0 else None  # in the sum
        return self.comm.all_reduce(linear(x, weight, once))


@dataclass(slots=True, frozen=True)
class SequenceSharded:
    """Each rank has its share of the tokens, one rank's after the other's: u = v / ranks. Nothing overlaps."""

    comm: Comm

    @property
    def whole(self) -> ActivationLayout:
        return Replicated(self.comm)

    def padded(self, x: Tensor) -> Tensor:
        missing = -len(x) % self.comm.size
        # A compiler would make a graph for each case.
        if torch.compiler.is_compiling() or missing:
            return F.pad(x, (0, 0, 0, missing))
        return x

    def own(self, x: Tensor) -> Tensor:
        return self.padded(x).chunk(self.comm.size)[self.comm.rank]

    def trimmed(self, x: Tensor, num_tokens: int) -> Tensor:
        return x[:num_tokens]

    def summed(self, x: Tensor) -> Tensor:
        return self.comm.reduce_scatter(x)

    def gathered(self, x: Tensor) -> Tensor:
        return self.comm.all_gather(x, 0)

    def column(self, x: Tensor, weight: Tensor, bias: Tensor | None, linear: Linear = F.linear) -> Tensor:
        return linear(self.comm.all_gather(x, 0), weight, bias)

    def gated(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, ops: Ops) -> Tensor:
        return ops.gated_linear(self.comm.all_gather(x, 0), weight, bias, activation)

    def row(self, x: Tensor, weight: Tensor, bias: Tensor | None, linear: Linear = F.linear) -> Tensor:
        output = self.comm.reduce_scatter(linear(x, weight, None))
        return output if bias is None else output + bias


@dataclass(slots=True, frozen=True)
class LayoutPolicy:
    """The ways that a model's steps are spread: `whole`, or in `shards`, if any, from `min_tokens` tokens on."""

    whole: ActivationLayout
    shards: ActivationLayout | None = None
    min_tokens: int = 0

    def of(self, num_tokens: int) -> ActivationLayout:
        """The way of a step of so many tokens."""
        if self.shards is None or num_tokens < self.min_tokens:
            return self.whole
        return self.shards
