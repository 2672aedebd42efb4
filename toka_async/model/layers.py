"""The parts of a decoder. Matrices are fused where they share an input, and split over tensor ranks.

Every parallel layer says which rows or columns of which checkpoint matrix it holds (`WeightPart`), so loading, random
weights and tensor parallelism share one description. Knows no file names and no model family.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toka_async.attention.base import QueryKeyNorm
from toka_async.model.activation_layout import ActivationLayout
from toka_async.model.comm import Comm, Share, padded_share_of, share_of
from toka_async.model.ops import Norm, Ops


@dataclass(slots=True, frozen=True)
class WeightPart:
    """Where one tensor of a checkpoint goes.

    target: the rank's values, a view of a parameter; a source with fewer dimensions is repeated over it. shape: the
    whole tensor's. dim, share: the rank's part along one dimension; None: all of it.
    """

    target: Tensor
    shape: tuple[int, ...]
    dim: int = 0
    share: Share | None = None


class ColumnLinear(nn.Module):
    """y = x Wᵀ + b for several fused matrices with one input; each rank holds a part of each one's outputs."""

    def __init__(self, num_inputs: int, shares: Sequence[Share], bias: bool, ops: Ops) -> None:
        """shares: the rank's outputs of each matrix."""
        super().__init__()
        self.ops = ops
        self.shares = shares
        rows = sum(share.size for share in shares)
        self.weight = make_unset(rows, num_inputs)
        self.bias = make_unset(rows) if bias else None

    def forward(self, x: Tensor, layout: ActivationLayout, norm: Norm | None = None) -> Tensor:
        """[u, inputs] to [v, the rank's outputs], matrix after matrix. norm: see `RMSNorm.defer`."""
        if norm is not None:
            return self.ops.linear(x, self.weight, self.bias, norm)
        return layout.column_linear(x, self.weight, self.bias, self.ops.linear)

    def forward_gated(self, x: Tensor, layout: ActivationLayout, activation: str, norm: Norm | None = None) -> Tensor:
        """Multiplies the activation of the first matrix' outputs with the second's outputs."""
        if norm is not None:
            return self.ops.gated_linear(x, self.weight, self.bias, activation, norm)
        return layout.gated_linear(x, self.weight, self.bias, activation, self.ops)

    def parts(self) -> Iterator[dict[str, WeightPart]]:
        """Yields the weight and bias of each fused matrix, by name."""
        start = 0
        for share in self.shares:
            rows = slice(start, start + share.size)
            start += share.size
            parts = {"weight": WeightPart(self.weight.data[rows], (share.total, self.weight.shape[1]), 0, share)}
            if self.bias is not None:
                parts["bias"] = WeightPart(self.bias.data[rows], (share.total,), 0, share)
            yield parts


class RowLinear(nn.Module):
    """Adds x Wᵀ + b to the residual; each rank holds a part of the inputs, and the ranks' results are summed."""

    def __init__(self, num_inputs: int, num_outputs: int, bias: bool, comm: Comm, ops: Ops) -> None:
        super().__init__()
        self.comm = comm
        self.ops = ops
        self.share = share_of(num_inputs, comm)
        self.weight = make_unset(num_outputs, self.share.size)
        self.bias = make_unset(num_outputs) if bias else None

    def forward(self, x: Tensor, residual: Tensor, layout: ActivationLayout) -> tuple[Tensor | None, Tensor]:
        """Takes x [v, the rank's inputs]; returns what to add to the residual, and the residual: [u, outputs]."""
        if self.comm.size == 1:
            return self.ops.add_linear(residual, x, self.weight, self.bias)
        return layout.row_linear(x, self.weight, self.bias, self.ops.linear), residual

    @property
    def adds(self) -> bool:
        """Tells whether products can be added to the residual as they are written."""
        return self.comm.size == 1 and self.bias is None

    def parts(self) -> dict[str, WeightPart]:
        parts = {"weight": WeightPart(self.weight.data, (len(self.weight), self.share.total), 1, self.share)}
        if self.bias is not None:
            parts["bias"] = WeightPart(self.bias.data, tuple(self.bias.shape))
        return parts


class VocabularyMatrix(nn.Module):
    """A row for each token id: embeds ids, scores hidden states, or both; each rank holds a part of the rows."""

    def __init__(self, num_ids: int, dim: int, comm: Comm, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.comm = comm
        self.share, rows = padded_share_of(num_ids, comm)
        self.weight = make_unset(rows, dim)

    def embed(self, token_ids: Tensor, layout: ActivationLayout) -> Tensor:
        """int64 [t] to [u, dim]."""
        if self.comm.size == 1:
            return F.embedding(token_ids, self.weight)
        rows = token_ids - self.share.start
        elsewhere = (rows < 0) | (rows >= self.share.size)
        own = F.embedding(rows.masked_fill(elsewhere, 0), self.weight)
        return layout.reduce(layout.pad(own.masked_fill(elsewhere[:, None], 0)))

    def logits(self, hidden: Tensor) -> Tensor:
        """[s, dim] to [s, ids]: the ids of all ranks, on every rank."""
        return self.comm.all_gather(self.ops.linear(hidden, self.weight), 1)[:, : self.share.total]

    def own_logits(self, hidden: Tensor) -> Tensor:
        """[s, dim], the same on all ranks, to [s / ranks, ids]: the rank's rows. Ranks divide s > 0."""
        ranks = self.comm.size
        part = self.ops.linear(hidden, self.weight)  # all rows, the rank's ids
        parts = self.comm.all_to_all(part.view(ranks, -1, part.shape[1]))
        # The padding's ids are the last ones.
        return parts.transpose(0, 1).reshape(len(hidden) // ranks, -1)[:, : self.share.total]

    def part(self) -> WeightPart:
        return WeightPart(self.weight.data[: self.share.size], (self.share.total, self.weight.shape[1]), 0, self.share)


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float, ops: Ops) -> None:
        super().__init__()
        self.weight = make_unset(dim)
        self.eps = eps
        self.ops = ops

    def forward(self, x: Tensor | None, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns norm(residual + x) and residual + x, [t, dim] each. None counts as zeros; one may be None."""
        if x is None:
            x, residual = residual, None
        assert x is not None
        return self.ops.add_norm(x, residual, self.weight, self.eps)

    def defer(
        self, x: Tensor | None, residual: Tensor | None, layout: ActivationLayout
    ) -> tuple[Tensor, Tensor, Norm | None]:
        """Leaves the norm to the product that follows where every rank has all tokens and there is nothing to add.

        Returns that product's input, the residual, and the norm of the input that is still to be computed, if any.
        """
        if layout.replicated is layout and (x is None or residual is None):
            total = residual if x is None else x
            assert total is not None
            return total, total, (self.weight, self.eps)
        return *self(x, residual), None

    def part(self) -> WeightPart:
        return WeightPart(self.weight.data, tuple(self.weight.shape))


class HeadNorm(nn.Module):
    """The weights [heads, dim] of an RMSNorm of every query and key head, which the attention backend applies."""

    def __init__(self, num_heads: int, num_kv_heads: int, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = make_unset(num_heads + num_kv_heads, dim)
        self.num_heads = num_heads
        self.shape = (dim,)
        self.eps = eps

    def forward(self) -> QueryKeyNorm:
        return QueryKeyNorm(self.weight, self.eps)

    def parts(self) -> tuple[WeightPart, WeightPart]:
        """Returns the checkpoint's one weight for all query heads, and the one for all key heads."""
        weight = self.weight.data
        return WeightPart(weight[: self.num_heads], self.shape), WeightPart(weight[self.num_heads :], self.shape)


def make_unset(*shape: int) -> nn.Parameter:
    """Makes an unset parameter of torch's default dtype on its default device."""
    return nn.Parameter(torch.empty(shape), requires_grad=False)
