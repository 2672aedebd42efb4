"""The parts of a decoder beside its matrices: the vocabulary, which tensor ranks split, norms, and layers' inputs.

Knows no file names and no model family.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toka_async.attention.base import QueryKeyNorm
from toka_async.checkpoint.layer_spec import LayerSpec
from toka_async.checkpoint.matrix_spec import MatrixSpec
from toka_async.checkpoint.spec import ModelSpec
from toka_async.model.activation_layout import ActivationLayout
from toka_async.model.comm import Comm, LocalComm
from toka_async.model.matrices.build import build_matrix
from toka_async.model.matrices.dense import DenseMatrix
from toka_async.model.matrices.matrix import Matrix, MatrixUse, Rows
from toka_async.model.matrices.ops import Ops
from toka_async.model.matrices.part import WeightPart, make_unset
from toka_async.model.matrices.share import Share, padded_share_of, whole_of


class VocabularyMatrix(DenseMatrix):
    """A row for each token id: embeds ids, scores hidden states, or both; each rank holds a part of the rows.

    fp32: logits are float32, as products are summed, and not rounded to the model's dtype. scale: of logits. soft_cap:
    c of c * tanh(logit / c), after the scale; 0: none.
    """

    def __init__(
        self,
        spec: MatrixSpec,
        comm: Comm,
        ops: Ops,
        *,
        fp32: bool = False,
        scale: float = 1.0,
        soft_cap: float = 0.0,
    ) -> None:
        share, num_rows = padded_share_of(spec.num_outputs, comm)
        super().__init__(spec, [whole_of(num_rows)], whole_of(spec.num_inputs), ops)
        self.comm = comm
        self.share = share
        self.fp32 = fp32
        self.scale = scale
        self.soft_cap = soft_cap

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
        logits = self._multiply(hidden)
        if self.scale != 1:
            logits = logits * self.scale
        if self.soft_cap:
            logits = (logits / self.soft_cap).tanh_().mul_(self.soft_cap)
        return logits

    def _multiply(self, hidden: Tensor) -> Tensor:
        if not self.fp32 or self.weight.dtype == torch.float32:
            return self.ops.linear(hidden, self.weight)
        if hidden.is_cuda:
            logits: Tensor = torch.mm(hidden, self.weight.t(), out_dtype=torch.float32)
            return logits
        return F.linear(hidden.float(), self.weight.float())  # of 16 bits each, so that products are the same

    def parts(self) -> Iterator[tuple[str, WeightPart]]:
        """Yields the rows of ids; what fills up the last ranks' is in no checkpoint."""
        yield f"{self.spec.names[0]}.weight", WeightPart(self.weight.data[: self.share.size], (self.share, self.inputs))


class InputNorm(Protocol):
    """What makes the input of half of a layer out of the residual."""

    def __call__(self, x: Tensor | None, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns norm(residual + x) and residual + x, [t, dim] each. None counts as zeros; one may be None."""
        ...

    def prepare(
        self, x: Tensor | None, residual: Tensor | None, matrix: Matrix, layout: ActivationLayout
    ) -> tuple[Rows, Tensor]:
        """Returns norm(residual + x) as the matrix takes it, and residual + x; see `__call__`."""
        ...


class NoNorm(nn.Module):
    """Takes the residual as it is, for halves whose result is normed instead."""

    def forward(self, x: Tensor | None, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        total = add_both(x, residual)
        return total, total

    def prepare(
        self,
        x: Tensor | None,
        residual: Tensor | None,
        matrix: Matrix,
        layout: ActivationLayout,  # noqa: ARG002
    ) -> tuple[Rows, Tensor]:
        total = add_both(x, residual)
        return matrix.take(total), total


def add_both(x: Tensor | None, residual: Tensor | None) -> Tensor:
    """Adds them; None counts as zeros; one may be None."""
    if x is None or residual is None:
        total = residual if x is None else x
        assert total is not None
        return total
    return residual + x


class RMSNorm(nn.Module):
    """An `InputNorm` with weights (arXiv:1910.07467).

    adds_one: the checkpoint's weights are what the factors have above 1; the sums are kept in float32, as models of
    that kind compute them.
    """

    def __init__(self, dim: int, eps: float, ops: Ops, adds_one: bool = False) -> None:
        super().__init__()
        self.weight = make_factors(dim, adds_one=adds_one)
        self.given = make_unset(dim).data.zero_() if adds_one else None
        self.eps = eps
        self.ops = ops

    def forward(self, x: Tensor | None, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if x is None:
            x, residual = residual, None
        assert x is not None
        return self.ops.add_norm(x, residual, self.weight, self.eps)

    def prepare(
        self, x: Tensor | None, residual: Tensor | None, matrix: Matrix, layout: ActivationLayout
    ) -> tuple[Rows, Tensor]:
        """Leaves the norm to the product where every rank has all tokens and there is nothing to add."""
        norm = self.weight, self.eps
        if x is None or residual is None:
            total = residual if x is None else x
            assert total is not None
            if layout.replicated is layout:
                return Rows(total, norm=norm), total
            x, residual = total, None
        return matrix.norm(x, residual, norm)

    def part(self) -> WeightPart:
        return factor_part(self.weight.data, whole_of(len(self.weight)), self.given)


def make_factors(*shape: int, adds_one: bool) -> nn.Parameter:
    """Makes a norm's unset factors; those that are sums with 1 have at least float32, which does not round them."""
    factors = make_unset(*shape)
    return nn.Parameter(factors.to(torch.promote_types(factors.dtype, torch.float32)), False) if adds_one else factors


def factor_part(factors: Tensor, share: Share, given: Tensor | None, order: Tensor | None = None) -> WeightPart:
    """Describes a norm's factors [..., dim] as the rank's share of a checkpoint's weight. order: see `WeightPart`.

    given: [dim], keeps the weight itself where the factors are its sums with 1, which round a small one.
    """
    if given is None:
        return WeightPart(factors, (share,), constant=1.0, order=order)

    def store(values: Tensor) -> None:
        given.copy_(values)
        factors.copy_(given.to(factors.dtype) + 1)

    def restore() -> Tensor:
        return torch.where(factors == given.to(factors.dtype) + 1, given, (factors - 1).to(given.dtype))

    return WeightPart(factors, (share,), constant=1.0, store=store, restore=restore, order=order)


class ResultNorm(nn.Module):
    """A norm of what half of a layer adds."""

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(x, None)[0]
        return normed

    def part(self) -> WeightPart:
        return self.norm.part()


class ResultScale(nn.Module):
    """A factor of what half of a layer adds."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class HeadNorm(nn.Module):
    """The weights [heads, dim] of an RMSNorm of every query and key head, which the attention backend applies."""

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        dim: int,
        eps: float,
        adds_one: bool = False,
        order: tuple[int, ...] = (),
    ) -> None:
        """adds_one: see `RMSNorm`. order: of a head's dimensions, see `RopeSpec.order_head`."""
        super().__init__()
        self.order = torch.tensor(order, dtype=torch.int64, device="cpu") if order else None
        self.weight = make_factors(num_heads + num_kv_heads, dim, adds_one=adds_one)
        self.given = make_unset(2, dim).data.zero_() if adds_one else None  # of queries, and of keys
        self.num_heads = num_heads
        self.dim = dim
        self.eps = eps

    def forward(self) -> QueryKeyNorm:
        return QueryKeyNorm(self.weight, self.eps)

    def parts(self) -> Iterator[tuple[str, WeightPart]]:
        """Yields the checkpoint's one weight for all query heads, and the one for all key heads, if there are any."""
        heads = self.weight.data[: self.num_heads], self.weight.data[self.num_heads :]
        for number, (name, weight) in enumerate(zip("qk", heads, strict=True)):
            if not len(weight):
                continue
            given = None if self.given is None else self.given[number]
            yield f"self_attn.{name}_norm.weight", factor_part(weight, whole_of(self.dim), given, self.order)


class ProjectionNorm(nn.Module):
    """An RMSNorm of all queries of a token as one vector, and one of all its keys; each rank has a part of them."""

    def __init__(self, queries: Share, keys: Share, eps: float, comm: Comm, ops: Ops) -> None:
        """queries, keys: the rank's parts, in values. Ranks may have the same keys."""
        super().__init__()
        self.weight = make_unset(queries.size + keys.size)
        self.shares = queries, keys
        self.eps = eps
        self.comm = comm
        self.ops = ops
        # What a rank's sum of squares counts in the mean: each key may be on several ranks.
        self.weights_in_means = 1 / queries.total, 1 / (keys.size * comm.size)

    def forward(self, heads: Tensor) -> Tensor:
        """Norms the queries and keys of [t, heads + 2 kv_heads, dim] in place, in float32 inside."""
        sizes = [share.size for share in self.shares]
        rows = heads.view(len(heads), -1)[:, : sum(sizes)]
        values = rows.to(torch.promote_types(rows.dtype, torch.float32), copy=True)
        parts = torch.split(values, sizes, dim=-1)
        sums = [self.ops.sum_squares(part) * weight for part, weight in zip(parts, self.weights_in_means, strict=True)]
        factors = torch.rsqrt(self.comm.all_reduce(torch.stack(sums, dim=-1)) + self.eps)  # [t, 2]
        for part, factor in zip(parts, torch.split(factors, 1, dim=-1), strict=True):
            part.mul_(factor)
        rows.copy_(values.mul_(self.weight))
        return heads

    def parts(self) -> Iterator[tuple[str, WeightPart]]:
        start = 0
        for name, share in zip("qk", self.shares, strict=True):
            weight = self.weight.data[start : start + share.size]
            yield f"self_attn.{name}_norm.weight", WeightPart(weight, (share,), constant=1.0)
            start += share.size


class ValueNorm(nn.Module):
    """An RMSNorm of each value head, without weights."""

    def __init__(self, num_kv_heads: int, eps: float) -> None:
        super().__init__()
        self.num_kv_heads = num_kv_heads
        self.eps = eps

    def forward(self, heads: Tensor) -> None:
        """Norms the values of [t, heads + 2 kv_heads, dim] in place."""
        values = heads[:, -self.num_kv_heads :]
        values.copy_(F.rms_norm(values, values.shape[-1:], None, self.eps))


class LayerInputs(nn.Module):
    """Makes the inputs of all layers (`LayerInputSpec`): of a token's id by a table, and of its embedding."""

    def __init__(self, spec: ModelSpec, comm: Comm, ops: Ops) -> None:
        super().__init__()
        table, projection = spec.input_matrices
        own = spec.layers[0].input
        assert own is not None
        self.table = VocabularyMatrix(table, comm, ops)
        self.projection = build_matrix(projection, LocalComm(), ops)
        self.norm = RMSNorm(own.size, spec.norm.eps, ops, spec.norm.adds_one)
        # Rounded as the weights are, like the models that have one were trained.
        self.table_scale = torch.tensor(own.size**0.5, device="cpu").item()

    def forward(self, token_ids: Tensor, embedded: Tensor, layout: ActivationLayout) -> Tensor:
        """int64 [t] and [u, hidden] to [u, inputs of all layers]."""
        projected = self.projection.product(self.projection.take(embedded)) * embedded.shape[1] ** -0.5
        normed: Tensor = self.norm(projected.view(-1, len(self.norm.weight)), None)[0].view_as(projected)
        of_ids = self.table.embed(token_ids, layout) * self.table_scale
        return (normed + of_ids).mul_(0.5**0.5)

    def parts(self) -> Iterator[tuple[str, WeightPart]]:
        yield from self.table.parts()
        yield from self.projection.parts()
        yield "model.per_layer_projection_norm.weight", self.norm.part()


class LayerInput(nn.Module):
    """What a layer makes of its input and the residual; see `LayerInputSpec`."""

    def __init__(self, spec: ModelSpec, layer: LayerSpec, ops: Ops) -> None:
        super().__init__()
        own = layer.input
        assert own is not None
        self.norm_name, self.activation = own.norm, own.activation
        gate, projection = layer.list_input_matrices(spec.hidden_size)
        self.gate = build_matrix(gate, LocalComm(), ops)
        self.projection = build_matrix(projection, LocalComm(), ops)
        self.norm = ResultNorm(RMSNorm(spec.hidden_size, spec.norm.eps, ops, spec.norm.adds_one))
        self.ops = ops

    def forward(self, residual: Tensor, own: Tensor) -> Tensor:
        """[u, hidden] and [u, size] to what is added to the residual."""
        gate = self.gate.product(self.gate.take(residual))
        gated = self.ops.gate(torch.cat((gate, own), 1), self.activation)
        added: Tensor = self.norm(self.projection.product(self.projection.take(gated)))
        return added

    def uses(self) -> Iterator[MatrixUse]:
        yield MatrixUse(self.gate)
        yield MatrixUse(self.projection)

    def parts(self) -> Iterator[tuple[str, WeightPart]]:
        yield from self.gate.parts()
        yield from self.projection.parts()
        yield f"{self.norm_name}.weight", self.norm.part()
