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
from toka_async.model.matrices.share import JoinedShare, share_of, share_units, whole_of


class DeltaNet(nn.Module):
    def __init__(self, spec: ModelSpec, number: int, index: int, comm: Comm, ops: Ops) -> None:
        """number: of the layer in the model. index: among the layers of the stage that have states."""
        super().__init__()
        mixer = spec.layers[number].mixer
        assert isinstance(mixer, DeltaNetSpec)
        self.index = index
        inputs, *gates, output = spec.layers[number].list_mixer_matrices(spec.hidden_size)
        self.inputs = build_matrix(inputs, comm, ops)
        # Of b and a, where the inputs are quantized and so have none.
        self.gates = build_matrix(gates[0], comm, ops) if gates else None
        self.output = build_matrix(output, comm, ops)
        self.channels = [share_units(units, comm) for units in mixer.channels]
        self.heads = share_of(mixer.num_value_heads, comm)
        self.convolution = make_unset(sum(share.size for share in self.channels), mixer.width)
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
        num_tokens, sizes = len(rotation.cos), [len(self.convolution), self.output.shape[1], 2 * self.heads.size]
        if self.gates is None:
            rows, residual = norm.prepare(hidden, residual, self.inputs, layout)
            inputs, z, gates = torch.split(layout.trim(layout.column(rows, self.inputs), num_tokens), sizes, dim=1)
        else:
            normed, residual = norm(hidden, residual)
            rows = self.inputs.take(normed)
            inputs, z = torch.split(layout.trim(layout.column(rows, self.inputs), num_tokens), sizes[:2], dim=1)
            gates = layout.trim(layout.column(self.gates.take(normed), self.gates), num_tokens)
        weights = DeltaWeights(self.convolution, self.log_decay, self.time_bias, self.norm, self.eps)
        return backend.states.compute(self.index, inputs, z, gates, weights), residual

    def uses(self, normed: torch.dtype | None) -> Iterator[MatrixUse]:
        yield MatrixUse(self.inputs, normed=normed if self.gates is None else None)
        if self.gates is not None:
            yield MatrixUse(self.gates)

    def parts(self) -> Iterator[tuple[str, WeightPart]]:
        for matrix in (self.inputs, self.gates, self.output):
            if matrix is not None:
                yield from matrix.parts()
        width = whole_of(self.convolution.shape[1])
        convolution, channels = self.convolution.data[:, None], JoinedShare(tuple(self.channels))
        yield "linear_attn.conv1d.weight", WeightPart(convolution, (channels, whole_of(1), width))
        for name, target in (("A_log", self.log_decay.data), ("dt_bias", self.time_bias.data)):
            restore = partial(target.to, self.norm.dtype)
            yield f"linear_attn.{name}", WeightPart(target, (self.heads,), constant=0.0, restore=restore)
        yield "linear_attn.norm.weight", WeightPart(self.norm.data, (whole_of(len(self.norm)),), constant=1.0)
