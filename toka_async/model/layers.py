"""The parts of a decoder beside its matrices: the vocabulary, which tensor ranks split, and norms.

Knows no file names and no model family.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toka_async.attention.base import QueryKeyNorm
from toka_async.checkpoint.matrix_spec import MatrixSpec
from toka_async.model.activation_layout import ActivationLayout
from toka_async.model.comm import Comm
from toka_async.model.matrices.dense import DenseMatrix
from toka_async.model.matrices.matrix import Matrix, Rows
from toka_async.model.matrices.ops import Ops
from toka_async.model.matrices.part import WeightPart, make_unset
from toka_async.model.matrices.share import padded_share_of, whole_of


class VocabularyMatrix(DenseMatrix):
    """A row for each token id: embeds ids, scores hidden states, or both; each rank holds a part of the rows.

    fp32: logits are float32, as products are summed, and not rounded to the model's dtype.
    """

    def __init__(self, spec: MatrixSpec, comm: Comm, ops: Ops, *, fp32: bool = False) -> None:
        share, num_rows = padded_share_of(spec.num_outputs, comm)
        super().__init__(spec, [whole_of(num_rows)], whole_of(spec.num_inputs), ops)
        self.comm = comm
        self.share = share
        self.fp32 = fp32

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
        return self.comm.all_gather(self._score(hidden), 1)[:, : self.share.total]

    def own_logits(self, hidden: Tensor) -> Tensor:
        """[s, dim], the same on all ranks, to [s / ranks, ids]: the rank's rows. Ranks divide s > 0."""
        ranks = self.comm.size
        part = self._score(hidden)  # all rows, the rank's ids
        parts = self.comm.all_to_all(part.view(ranks, -1, part.shape[1]))
        # The padding's ids are the last ones.
        return parts.transpose(0, 1).reshape(len(hidden) // ranks, -1)[:, : self.share.total]

    def _score(self, hidden: Tensor) -> Tensor:
        """[s, dim] to [s, the rank's ids]."""
        if not self.fp32 or self.weight.dtype == torch.float32:
            return self.ops.linear(hidden, self.weight)
        if hidden.is_cuda:
            logits: Tensor = torch.mm(hidden, self.weight.t(), out_dtype=torch.float32)
            return logits
        return F.linear(hidden.float(), self.weight.float())  # of 16 bits each, so that products are the same

    def parts(self) -> Iterator[tuple[str, WeightPart]]:
        """Yields the rows of ids; what fills up the last ranks' is in no checkpoint."""
        yield f"{self.spec.names[0]}.weight", WeightPart(self.weight.data[: self.share.size], (self.share, self.inputs))


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

    def prepare(
        self, x: Tensor | None, residual: Tensor | None, matrix: Matrix, layout: ActivationLayout
    ) -> tuple[Rows, Tensor]:
        """Returns norm(residual + x) as the matrix takes it, and residual + x; see `forward`.

        Leaves the norm to the product where every rank has all tokens and there is nothing to add.
        """
        norm = self.weight, self.eps
        if x is None or residual is None:
            total = residual if x is None else x
            assert total is not None
            if layout.replicated is layout:
                return Rows(total, norm=norm), total
            x, residual = total, None
        return matrix.norm(x, residual, norm)

    def part(self) -> WeightPart:
        return WeightPart(self.weight.data, (whole_of(len(self.weight)),), constant=1.0)


class HeadNorm(nn.Module):
    """The weights [heads, dim] of an RMSNorm of every query and key head, which the attention backend applies."""

    def __init__(self, num_heads: int, num_kv_heads: int, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = make_unset(num_heads + num_kv_heads, dim)
        self.num_heads = num_heads
        self.dim = dim
        self.eps = eps

    def forward(self) -> QueryKeyNorm:
        return QueryKeyNorm(self.weight, self.eps)

    def parts(self) -> Iterator[tuple[str, WeightPart]]:
        """Yields the checkpoint's one weight for all query heads, and the one for all key heads."""
        for name, weight in (("q", self.weight.data[: self.num_heads]), ("k", self.weight.data[self.num_heads :])):
            yield f"self_attn.{name}_norm.weight", WeightPart(weight, (whole_of(self.dim),), constant=1.0)
