"""Grouped-query attention (arXiv:2305.13245) as a `Mixer`: projections around what an attention backend computes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from toka_async.attention.base import AttentionBackend
from toka_async.checkpoint.attention_spec import AttentionSpec
from toka_async.checkpoint.matrix_spec import MatrixSpec, Units
from toka_async.checkpoint.spec import ModelSpec
from toka_async.model.activation_layout import ActivationLayout
from toka_async.model.comm import Comm
from toka_async.model.layers import HeadNorm, InputNorm, ProjectionNorm, ValueNorm
from toka_async.model.matrices.build import build_matrix
from toka_async.model.matrices.matrix import MatrixUse
from toka_async.model.matrices.ops import Ops
from toka_async.model.matrices.part import WeightPart, make_unset
from toka_async.model.matrices.share import share_of, share_units


class Rotation(NamedTuple):
    """What a step's tokens turn by in the layers of one rope: see `attention.rope.Rope`.

    growth: factors of queries, [t, 1, 1]; None: all are 1.
    """

    cos: Tensor
    sin: Tensor
    growth: Tensor | None = None


class Attention(nn.Module):
    def __init__(self, spec: ModelSpec, number: int, index: int, comm: Comm, ops: Ops) -> None:
        """number: of the layer in the model. index: of its keys, among the layers of the stage that have some."""
        super().__init__()
        attention = spec.layers[number].mixer
        assert isinstance(attention, AttentionSpec)
        self.index = index
        self.ops = ops
        self.dim = attention.head_dim
        qkv, output = spec.layers[number].list_mixer_matrices(spec.hidden_size)
        self.qkv = build_matrix(qkv, comm, ops)
        self.head_norm, self.projection_norm = _build_norms(attention, qkv, spec.norm.eps, comm, ops)
        self.value_norm: ValueNorm | None = None
        if attention.value_norm and not attention.reads_back:
            num_values = share_units(qkv.outputs[2], comm).size // self.dim
            self.value_norm = ValueNorm(num_values, spec.norm.eps)
        self.output = build_matrix(output, comm, ops)
        self.num_gates = self.output.shape[1] if attention.gated else 0
        self.own_heads = share_of(attention.num_heads, comm)
        self.sinks = make_unset(self.own_heads.size) if attention.sinks else None

    def forward(
        self,
        hidden: Tensor | None,
        residual: Tensor | None,
        norm: InputNorm,
        rotation: Rotation,
        backend: AttentionBackend,
        layout: ActivationLayout,
    ) -> tuple[Tensor, Tensor]:
        """Returns each token's mix of the values that it sees, [t, heads * dim]. See `Mixer`."""
        rows, residual = norm.prepare(hidden, residual, self.qkv, layout)
        num_tokens = len(rotation.cos)
        projected = layout.trim(layout.column(rows, self.qkv), num_tokens)
        heads = projected[:, self.num_gates :].view(
            num_tokens, -1, self.dim
        )  # [t, heads + 2 kv_heads, dim] or [t, heads, dim]
        if self.projection_norm is not None:
            heads = self.projection_norm(heads)
        if self.value_norm is not None:
            self.value_norm(heads)
        if rotation.growth is not None:
            heads[:, : self.own_heads.size].mul_(rotation.growth)
        head_norm = self.head_norm() if self.head_norm is not None else None
        mixed = backend.attend(self.index, heads, rotation[:2], head_norm, self.sinks).flatten(1)
        if self.num_gates:
            mixed = self.ops.apply_gates(mixed, projected[:, : self.num_gates])
        return mixed, residual

    def uses(self, normed: torch.dtype | None) -> Iterator[MatrixUse]:
        yield MatrixUse(self.qkv, normed=normed)

    def parts(self) -> Iterator[tuple[str, WeightPart]]:
        yield from self.qkv.parts()
        yield from self.output.parts()
        norm = self.head_norm or self.projection_norm
        if norm is not None:
            yield from norm.parts()
        if self.sinks is not None:
            yield "self_attn.sinks", WeightPart(self.sinks.data, (self.own_heads,))


def _build_norms(
    attention: AttentionSpec, qkv: MatrixSpec, eps: float, comm: Comm, ops: Ops
) -> tuple[HeadNorm | None, ProjectionNorm | None]:
    norm, dim = attention.head_norm, attention.head_dim
    if norm is None:
        return None, None
    queries = share_units(Units(attention.num_heads, dim), comm)
    if attention.reads_back:
        assert norm.over == "head", "a norm of a whole projection is of keys as well"
        return HeadNorm(queries.size // dim, 0, dim, eps, norm.adds_one, qkv.outputs[0].order), None
    keys = share_units(qkv.outputs[1], comm)
    if norm.over == "projection":
        return None, ProjectionNorm(queries, keys, eps, comm, ops)
    order = qkv.outputs[1].order
    return HeadNorm(queries.size // dim, keys.size // dim, dim, eps, norm.adds_one, order), None
