"""A mixture of experts as a `Feed` (arXiv:2401.04088): a router chooses the networks that a token passes through."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from toka_async.checkpoint.experts_spec import ExpertMatrixSpec, ExpertNames, ExpertsFeedSpec
from toka_async.checkpoint.layer_spec import LayerSpec
from toka_async.kernels.experts.weights import ExpertWeights
from toka_async.model.activation_layout import ActivationLayout
from toka_async.model.comm import Comm, LocalComm
from toka_async.model.layers import RMSNorm
from toka_async.model.matrices.build import build_matrix
from toka_async.model.matrices.matrix import MatrixUse
from toka_async.model.matrices.ops import Ops
from toka_async.model.matrices.part import WeightPart, make_unset
from toka_async.model.matrices.share import Share, share_of, whole_of


@dataclass(slots=True, frozen=True)
class _Member:
    """A rank among those of a group, or a group among all."""

    rank: int
    size: int


class ExpertMatrices(nn.Module):
    """The rank's experts: gate and up as one parameter [held, 2 * inner, hidden], down as [held, hidden, inner]."""

    bias = None

    def __init__(self, spec: ExpertMatrixSpec, held: Share, inner: Share, hidden_size: int, names: ExpertNames) -> None:
        """spec: of gate and up. held: the rank's experts. inner: the rank's units of each."""
        super().__init__()
        self.spec = spec
        self.names = names
        self.held = held
        self.inner = inner
        self.gate_up = make_unset(held.size, 2 * inner.size, hidden_size)
        self.down = make_unset(held.size, hidden_size, inner.size)

    @property
    def shape(self) -> tuple[int, int]:
        """Of an expert's gate and up."""
        _, n, k = self.gate_up.shape
        return n, k

    def parts(self) -> Iterator[tuple[str, WeightPart]]:
        """Yields the tensors of all experts; those of other ranks have no values here."""
        names, hidden = self.names, whole_of(self.down.shape[1])
        gate, up = self.gate_up.data.chunk(2, dim=1)
        # For each name: the parameter, and the rank's part of an expert.
        matrices = {
            names.gate: (gate, (self.inner, hidden)),
            names.up: (up, (self.inner, hidden)),
            names.down: (self.down.data, (hidden, self.inner)),
        }
        for number in range(self.held.total):
            place = number - self.held.start
            for name, (weight, (rows, columns)) in matrices.items():
                part = (
                    WeightPart(weight[place], (rows, columns))
                    if 0 <= place < self.held.size
                    else WeightPart(weight[:0, 0], (Share(rows.total, 0, 0), columns))
                )
                yield f"{names.experts}.{number}.{name}.weight", part


class ExpertsFeed(nn.Module):
    """Ranks route all tokens alike. Each computes what its experts, or its units of them, make of them.

    Groups of tensor ranks divide the experts, the ranks of a group their units; the sum over all ranks is that of a
    dense feed.
    """

    def __init__(self, layer: LayerSpec, hidden_size: int, comm: Comm, ops: Ops) -> None:
        super().__init__()
        feed = layer.feed
        assert isinstance(feed, ExpertsFeedSpec)
        self.spec = feed
        self.ops = ops
        self.adds = comm.size == 1
        router, gate_up, _ = feed.list_matrices(hidden_size, layer.format)
        self.router = build_matrix(router, LocalComm(), ops)
        group, rank = divmod(comm.rank, comm.size // feed.num_groups)
        held = share_of(feed.num_experts, _Member(group, feed.num_groups))
        inner = share_of(feed.inner, _Member(rank, comm.size // feed.num_groups))
        self.experts = ExpertMatrices(gate_up, held, inner, hidden_size, feed.names)
        self.loads = nn.Buffer(torch.zeros(feed.num_experts, dtype=torch.int64))  # tokens that chose each expert
        self.counted: Tensor | None = None  # see `ExpertWeights`

    def forward(
        self, hidden: Tensor | None, residual: Tensor, norm: RMSNorm, layout: ActivationLayout
    ) -> tuple[Tensor | None, Tensor]:
        normed, residual = norm(hidden, residual)
        x = layout.gather(normed)
        logits = self.router.product(self.router.take(x))
        if self.adds:
            return None, self.ops.mix_experts(x, logits, self.weights, residual)
        return layout.reduce(self.ops.mix_experts(x, logits, self.weights, None)), residual

    @property
    def weights(self) -> ExpertWeights:
        spec, experts = self.spec, self.experts
        return ExpertWeights(
            gate_up=experts.gate_up,
            down=experts.down,
            first=experts.held.start,
            top_k=spec.top_k,
            renormalizes=spec.renormalizes,
            activation=spec.activation,
            loads=self.loads,
            counted=self.counted,
        )

    def uses(self, normed: bool) -> Iterator[MatrixUse]:  # noqa: ARG002
        """Yields the router of a rank alone: several must round alike, but each chooses its own fastest product."""
        if self.adds:
            yield MatrixUse(self.router)

    def parts(self) -> Iterator[tuple[str, WeightPart]]:
        yield from self.router.parts()
        yield from self.experts.parts()
