"""The decoder of all families: token ids and positions in, hidden states and logits out.

Shapes: t tokens of all rows of a step, one after the other. The attention backend decides which tokens see which, an
`ActivationLayout` how activations lie on tensor ranks (u, v). Each half of a layer adds its input to the residual as it
norms it, and returns what the next half adds. A decoder may be one stage of a pipeline: some of the layers, with the
residual coming in or going out in place of ids and norm. Knows no rows, no pages, no checkpoint; families differ only
by their `ModelSpec`.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from toka_async.attention.base import AttentionBackend
from toka_async.attention.rope import Rope
from toka_async.checkpoint.division import StagePart, all_layers
from toka_async.checkpoint.spec import ModelSpec
from toka_async.model.activation_layout import ActivationLayout, LayoutPolicy, Replicated
from toka_async.model.comm import Comm, kv_share_of, share_of
from toka_async.model.layers import ColumnLinear, HeadNorm, RMSNorm, RowLinear, VocabularyMatrix
from toka_async.model.ops import Norm, Ops

Rotation = tuple[Tensor, Tensor]


class Decoder(nn.Module):
    """A decoder-only transformer, or one stage of it. `toka_async.model.weights` sets its parameters.

    The layers of a stage are numbered from 0, as in its attention. A tied head is a copy of the embedding where the
    stage has only one of the two.
    """

    def __init__(
        self,
        spec: ModelSpec,
        comm: Comm,
        ops: Ops,
        layouts: LayoutPolicy | None = None,
        part: StagePart | None = None,
    ) -> None:
        """spec: the whole model. layouts: the layouts on the ranks of `comm`; None: replicated."""
        super().__init__()
        self.layouts = layouts or LayoutPolicy(Replicated(comm))
        self.part = part = part or all_layers(spec)
        self.tied = spec.tie_embeddings
        self.num_heads = share_of(spec.num_heads, comm).size  # the rank's query heads
        self.embedding = VocabularyMatrix(spec.vocab_size, spec.hidden_size, comm, ops) if part.is_first else None
        self.rope = Rope(spec.rope, spec.head_dim, ops.compute_rotation)
        self.layers = nn.ModuleList(Layer(spec, part.first + index, index, comm, ops) for index in range(part.size))
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps, ops) if part.is_last else None
        self.head: VocabularyMatrix | None = None
        if part.is_last:
            tied = self.embedding if self.tied else None
            self.head = tied or VocabularyMatrix(spec.vocab_size, spec.hidden_size, comm, ops)

    def forward(
        self, inputs: Tensor, positions: Tensor, attention: AttentionBackend, wanted: Tensor | None = None
    ) -> Tensor:
        """Returns normalised hidden states [t, hidden] of all tokens, or [w, hidden] of the wanted ones.

        inputs: token ids, int64 [t]; a later stage takes the output of the one before. A stage that is not the last
        returns the residual [t, hidden] before the next layer's norm. positions: int64 [t]. wanted: int64 [w], indices
        of tokens; the others leave their keys and values in every layer, which is all that later tokens need of them,
        and skip the rest of the last layer.
        """
        return self.finish(*self.begin(inputs, positions, attention), wanted)

    def begin(self, inputs: Tensor, positions: Tensor, attention: AttentionBackend) -> tuple[Tensor, Tensor]:
        """Computes everything up to the last layer's attention: the part of a step in which all tokens are needed.

        Returns what each token attends to, [t, the rank's heads * dim], and the residual [u, hidden].
        """
        layout = self.layouts.choose(len(inputs))
        # [u, hidden] each
        first = layout.take_own(inputs) if self.embedding is None else self.embedding.embed(inputs, layout)
        rotation = self.rope(positions, first.dtype)  # cos, sin: [t, 1, dim]
        hidden: Tensor | None = first
        residual: Tensor | None = None
        *layers, last = self.list_layers()
        for layer in layers:
            hidden, residual = layer(hidden, residual, rotation, attention, layout)
        return last.attend(hidden, residual, rotation, attention, layout)

    def finish(self, attended: Tensor, residual: Tensor, wanted: Tensor | None = None) -> Tensor:
        """Computes what follows `begin`, of all tokens or those wanted; see `forward`. May overwrite the residual."""
        num_tokens = len(attended)
        layout = self.layouts.choose(num_tokens)
        hidden, residual = self.list_layers()[-1].finish(attended, residual, layout, wanted)
        if self.norm is None:
            total = residual if hidden is None else residual + hidden
            return layout.trim(layout.gather(total), num_tokens)
        normed: Tensor = self.norm(hidden, residual)[0]
        return layout.trim(layout.gather(normed), num_tokens) if wanted is None else normed

    def list_layers(self) -> list[Layer]:
        return cast(list[Layer], list(self.layers))

    def logits(self, hidden: Tensor) -> Tensor:
        """[s, hidden] to [s, vocab], in the activations' dtype; the last stage only."""
        assert self.head is not None
        return self.head.logits(hidden)

    def own_logits(self, hidden: Tensor) -> Tensor:
        """[s, hidden] to [s / ranks, vocab] of the rank's rows; s > 0 is a multiple of the tensor ranks."""
        assert self.head is not None
        return self.head.own_logits(hidden)


class Layer(nn.Module):
    """Attention and a gated MLP, each with a norm before and a residual around."""

    def __init__(self, spec: ModelSpec, number: int, index: int, comm: Comm, ops: Ops) -> None:
        """number: of the layer in the model. index: in the stage."""
        super().__init__()
        self.attention_norm = RMSNorm(spec.hidden_size, spec.norm_eps, ops)
        self.attention = Attention(spec, index, comm, ops)
        self.mlp_norm = RMSNorm(spec.hidden_size, spec.norm_eps, ops)
        self.mlp = MLP(spec, number, comm, ops)

    def forward(
        self,
        hidden: Tensor | None,
        residual: Tensor | None,
        rotation: Rotation,
        backend: AttentionBackend,
        layout: ActivationLayout,
    ) -> tuple[Tensor | None, Tensor]:
        """Returns what to add to the residual, and the residual: [u, hidden] each. May overwrite the given residual."""
        return self.finish(*self.attend(hidden, residual, rotation, backend, layout), layout)

    def attend(
        self,
        hidden: Tensor | None,
        residual: Tensor | None,
        rotation: Rotation,
        backend: AttentionBackend,
        layout: ActivationLayout,
    ) -> tuple[Tensor, Tensor]:
        """Adds [u, hidden] to the residual. Returns what tokens attend to, [t, heads * dim], and the residual."""
        normed, residual, norm = self.attention_norm.defer(hidden, residual, layout)
        return self.attention(normed, rotation, backend, layout, norm), residual

    def finish(
        self, attended: Tensor, residual: Tensor, layout: ActivationLayout, wanted: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor]:
        """Computes what follows attention, for all tokens or the wanted ones [w]. May overwrite the given residual.

        Wanted tokens are few: once the others have left, every rank has all of them.
        """
        if wanted is not None:
            attended, residual = attended.index_select(0, wanted), layout.gather(residual).index_select(0, wanted)
            layout = layout.replicated
        hidden, residual = self.attention.output(layout.pad(attended), residual, layout)
        normed, residual, norm = self.mlp_norm.defer(hidden, residual, layout)
        output: tuple[Tensor | None, Tensor] = self.mlp(normed, residual, layout, norm)
        return output


class Attention(nn.Module):
    """Grouped-query attention (arXiv:2305.13245) with rotary positions."""

    def __init__(self, spec: ModelSpec, index: int, comm: Comm, ops: Ops) -> None:
        super().__init__()
        self.index = index
        self.dim = spec.head_dim
        heads, kv_heads = share_of(spec.num_heads, comm), kv_share_of(spec.num_kv_heads, comm)
        wide, narrow = heads.times(self.dim), kv_heads.times(self.dim)
        self.qkv = ColumnLinear(spec.hidden_size, (wide, narrow, narrow), spec.attention_bias, ops)
        self.head_norm: HeadNorm | None = None
        if spec.qk_norm:
            self.head_norm = HeadNorm(heads.size, kv_heads.size, self.dim, spec.norm_eps)
        self.output = RowLinear(wide.total, spec.hidden_size, spec.output_bias, comm, ops)

    def forward(
        self,
        hidden: Tensor,
        rotation: Rotation,
        backend: AttentionBackend,
        layout: ActivationLayout,
        deferred: Norm | None = None,
    ) -> Tensor:
        """[u, hidden] to each token's mix of the values that it sees [t, heads * dim], for `output` to project.

        deferred: see `RMSNorm.defer`.
        """
        num_tokens = len(rotation[0])
        heads = layout.trim(self.qkv(hidden, layout, deferred), num_tokens)
        heads = heads.view(num_tokens, -1, self.dim)  # [t, heads + 2 kv_heads, dim]
        norm = self.head_norm() if self.head_norm is not None else None
        return backend.attend(self.index, heads, rotation, norm).flatten(1)


class MLP(nn.Module):
    """The gated feed-forward network (arXiv:2002.05202)."""

    def __init__(self, spec: ModelSpec, number: int, comm: Comm, ops: Ops) -> None:
        super().__init__()
        feed = spec.layers[number].feed
        inner = feed.inner
        self.activation = feed.activation
        share = share_of(inner, comm)
        self.gate_up = ColumnLinear(spec.hidden_size, (share, share), feed.bias, ops)
        self.down = RowLinear(inner, spec.hidden_size, feed.bias, comm, ops)

    def forward(
        self, hidden: Tensor, residual: Tensor, layout: ActivationLayout, deferred: Norm | None = None
    ) -> tuple[Tensor | None, Tensor]:
        """Returns what to add to the residual, and the residual; all are [u, hidden]. deferred: see `RMSNorm.defer`."""
        inner = self.gate_up.forward_gated(hidden, layout, self.activation, deferred)
        output: tuple[Tensor | None, Tensor] = self.down(inner, residual, layout)
        return output
