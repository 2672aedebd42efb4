"""Gated DeltaNet (arXiv:2412.06464) as a `Mixer`: projections around what a backend computes with states."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from toka_async.attention.base import AttentionBackend
from toka_async.attention.states.backend import StateBackend
from toka_async.checkpoint.delta_net_spec import DeltaNetSpec
from toka_async.checkpoint.spec import ModelSpec
from toka_async.kernels.delta.layer import DeltaWeights
from toka_async.model.activation_layout import ActivationLayout
from toka_async.model.attention import Rotation
from toka_async.model.comm import Comm
from toka_async.model.layers import InputNorm
from toka_async.model.matrices.build import build_matrix
from toka_async.model.matrices.matrix import MatrixUse
from toka_async.model.matrices.ops import Ops
from toka_async.model.matrices.part import WeightPart, make_unset
from toka_async.model.matrices.share import share_of, share_rows, whole_of


class DeltaNet(nn.Module):
    def __init__(self, spec: ModelSpec, number: int, index: int, comm: Comm, ops: Ops) -> None:
        """number: of the layer in the model. index: among the layers of the stage that have states."""
        super().__init__()
        mixer = spec.layers[number].mixer
        assert isinstance(mixer, DeltaNetSpec)
        self.index = index
        projection, gates, output = spec.layers[number].list_mixer_matrices(spec.hidden_size)
        self.projection = build_matrix(projection, comm, ops)
        self.gates = build_matrix(gates, comm, ops)
        self.output = build_matrix(output, comm, ops)
        self.channels, self.heads = share_rows(mixer.channels, comm), share_of(mixer.num_value_heads, comm)
        self.convolution = make_unset(self.channels.size, mixer.width)
        # As precise as the states that they decay.
        self.log_decay = nn.Parameter(torch.empty(self.heads.size, dtype=torch.float32), requires_grad=False)
        self.time_bias = nn.Parameter(torch.empty(self.heads.size, dtype=torch.float32), requires_grad=False)
        self.norm = make_unset(mixer.value_dim)
        self.eps = spec.norm.eps

    def forward(
        self,
        hidden: Tensor | None,
        residual: Tensor | None,
        norm: InputNorm,
        rotation: Rotation,
        backend: AttentionBackend,
        layout: ActivationLayout,
    ) -> tuple[Tensor, Tensor]:
        """Returns what each token reads from its row's state, [t, values]. See `Mixer`."""
        assert isinstance(backend, StateBackend)
        normed, residual = norm(hidden, residual)
        num_tokens = len(rotation[0])
        projected, gates = (
            layout.trim(layout.column(matrix.take(normed), matrix), num_tokens)
            for matrix in (self.projection, self.gates)
        )
        weights = DeltaWeights(self.convolution, self.log_decay, self.time_bias, self.norm, self.eps)
        return backend.states.compute(self.index, projected, gates, weights), residual

    def uses(self, normed: bool) -> Iterator[MatrixUse]:  # noqa: ARG002
        yield MatrixUse(self.projection)
        yield MatrixUse(self.gates)

    def parts(self) -> Iterator[tuple[str, WeightPart]]:
        yield from self.projection.parts()
        yield from self.gates.parts()
        yield from self.output.parts()
        width = whole_of(self.convolution.shape[1])
        convolution = self.convolution.data[:, None]
        yield "linear_attn.conv1d.weight", WeightPart(convolution, (self.channels, whole_of(1), width))
        for name, target in (("A_log", self.log_decay.data), ("dt_bias", self.time_bias.data)):
            part = WeightPart(target, (self.heads,), constant=0.0, store=partial(_store, target))
            yield f"linear_attn.{name}", part
        yield "linear_attn.norm.weight", WeightPart(self.norm.data, (whole_of(len(self.norm)),), constant=1.0)


def _store(target: Tensor, values: Tensor) -> None:
    """Keeps values in float32, which a checkpoint may have in another dtype."""
    target.copy_(values)
