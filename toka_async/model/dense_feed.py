"""The gated feed-forward network (arXiv:2002.05202) as a `Feed`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from toka_async.checkpoint.layer_spec import DenseFeedSpec, LayerSpec
from toka_async.model.activation_layout import ActivationLayout
from toka_async.model.comm import Comm
from toka_async.model.layers import InputNorm
from toka_async.model.matrices.build import build_matrix
from toka_async.model.matrices.matrix import MatrixUse
from toka_async.model.matrices.ops import Ops
from toka_async.model.matrices.part import WeightPart


class DenseFeed(nn.Module):
    """Every token passes through all units, of which each tensor rank has a part."""

    def __init__(self, layer: LayerSpec, hidden_size: int, comm: Comm, ops: Ops, adds: bool = True) -> None:
        super().__init__()
        feed = layer.feed
        assert isinstance(feed, DenseFeedSpec)
        gate_up, down = layer.list_feed_matrices(hidden_size)
        self.activation = feed.activation
        self.gate_up = build_matrix(gate_up, comm, ops)
        self.down = build_matrix(down, comm, ops)
        self.may_add = adds
        self.adds = adds and comm.size == 1 and not down.bias

    def forward(
        self, hidden: Tensor | None, residual: Tensor, norm: InputNorm, layout: ActivationLayout
    ) -> tuple[Tensor | None, Tensor]:
        gate_up, down = self.gate_up, self.down
        rows, residual = norm.prepare(hidden, residual, gate_up, layout)
        inner = layout.gated(rows, gate_up, self.activation, down)
        return layout.row(inner, down, residual) if self.may_add else (layout.sum(inner, down), residual)

    def uses(self, normed: torch.dtype | None) -> Iterator[MatrixUse]:
        yield MatrixUse(self.gate_up, self.activation, normed=normed)
        yield MatrixUse(self.down, adds=self.adds)

    def parts(self) -> Iterator[tuple[str, WeightPart]]:
        yield from self.gate_up.parts()
        yield from self.down.parts()
