"""The decoder of all families: token ids and positions in, hidden states and logits out.

Shapes: t tokens of all rows of a step, one after the other. The attention backend decides which tokens see which, an
`ActivationLayout` how activations lie on tensor ranks (u, v). Each half of a layer adds its input to the residual as it
norms it, and returns what the next half adds. A decoder may be one stage of a pipeline: some of the layers, with the
residual coming in or going out in place of ids and norm. Knows no rows, no pages, no files; families differ only by
their `ModelSpec`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from torch import Tensor, nn

from toka_async.attention.base import AttentionBackend
from toka_async.attention.rope import Rope
from toka_async.checkpoint.division import StagePart, all_layers
from toka_async.checkpoint.spec import ModelSpec
from toka_async.model.activation_layout import ActivationLayout, LayoutPolicy, Replicated
from toka_async.model.comm import Comm
from toka_async.model.feed import build_feed
from toka_async.model.layers import HeadNorm, RMSNorm, VocabularyMatrix
from toka_async.model.matrices.build import build_matrix
from toka_async.model.matrices.matrix import MatrixUse, Rows
from toka_async.model.matrices.ops import Ops
from toka_async.model.matrices.part import WeightPart
from toka_async.model.matrices.share import share_of, share_units

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
        self.num_heads = share_of(spec.num_heads, comm).size  # the rank's query heads
        fp32 = spec.fp32_logits
        self.embedding = VocabularyMatrix(spec.embedding_matrix, comm, ops, fp32=fp32) if part.is_first else None
        self.rope = Rope(spec.rope, spec.head_dim, ops.compute_rotation)
        self.layers = nn.ModuleList(Layer(spec, part.first + index, index, comm, ops) for index in range(part.size))
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps, ops) if part.is_last else None
        self.head: VocabularyMatrix | None = None
        if part.is_last:
            tied = self.embedding if spec.tie_embeddings else None
            self.head = tied or VocabularyMatrix(spec.head_matrix, comm, ops, fp32=fp32)

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

    def uses(self) -> Iterator[MatrixUse]:
        """Yields how steps use each matrix, which the start tunes."""
        for layer in self.list_layers():
            yield from layer.uses()
        if self.head is not None and not self.head.fp32:  # torch computes products to float32
            yield MatrixUse(self.head, of_samples=True)

    def parts(self) -> Iterator[tuple[str, WeightPart]]:
        """Yields every tensor that a checkpoint must have for this decoder, by name, and where it goes."""
        if self.embedding is not None:
            yield from self.embedding.parts()
        for index, layer in enumerate(self.list_layers(), self.part.first):
            for name, part in layer.parts():
                yield f"model.layers.{index}.{name}", part
        if self.norm is not None:
            yield "model.norm.weight", self.norm.part()
        if self.head is not None and self.head is not self.embedding:
            yield from self.head.parts()


class Layer(nn.Module):
    """Attention and a feed, each with a norm before and a residual around."""

    def __init__(self, spec: ModelSpec, number: int, index: int, comm: Comm, ops: Ops) -> None:
        """number: of the layer in the model. index: in the stage."""
        super().__init__()
        self.attention_norm = RMSNorm(spec.hidden_size, spec.norm_eps, ops)
        self.attention = Attention(spec, number, index, comm, ops)
        self.feed_norm = RMSNorm(spec.hidden_size, spec.norm_eps, ops)
        self.feed = build_feed(spec.layers[number], spec.hidden_size, comm, ops)

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
        attention = self.attention
        rows, residual = self.attention_norm.prepare(hidden, residual, attention.qkv, layout)
        return attention(rows, rotation, backend, layout), residual

    def finish(
        self, attended: Tensor, residual: Tensor, layout: ActivationLayout, wanted: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor]:
        """Computes what follows attention, for all tokens or the wanted ones [w]. May overwrite the given residual.

        Wanted tokens are few: once the others have left, every rank has all of them.
        """
        if wanted is not None:
            attended, residual = attended.index_select(0, wanted), layout.gather(residual).index_select(0, wanted)
            layout = layout.replicated
        output = self.attention.output
        hidden, residual = layout.row(output.take(layout.pad(attended)), output, residual)
        return self.feed(hidden, residual, self.feed_norm, layout)

    def uses(self) -> Iterator[MatrixUse]:
        attention = self.attention
        yield MatrixUse(attention.qkv, normed=self.feed.adds)  # of the layer before, which is like this one
        yield MatrixUse(attention.output, adds=attention.adds)
        yield from self.feed.uses(normed=attention.adds)

    def parts(self) -> Iterator[tuple[str, WeightPart]]:
        """Yields the tensors by their names in the layer."""
        yield "input_layernorm.weight", self.attention_norm.part()
        yield "post_attention_layernorm.weight", self.feed_norm.part()
        yield from self.attention.parts()
        yield from self.feed.parts()


class Attention(nn.Module):
    """Grouped-query attention (arXiv:2305.13245) with rotary positions."""

    def __init__(self, spec: ModelSpec, number: int, index: int, comm: Comm, ops: Ops) -> None:
        super().__init__()
        self.index = index
        self.dim = spec.head_dim
        qkv, output = spec.list_attention_matrices(number)
        self.qkv = build_matrix(qkv, comm, ops)
        self.head_norm: HeadNorm | None = None
        if spec.qk_norm:
            queries, keys, _ = (share_units(units, comm).size // self.dim for units in qkv.outputs)
            self.head_norm = HeadNorm(queries, keys, self.dim, spec.norm_eps)
        self.output = build_matrix(output, comm, ops)
        self.adds = comm.size == 1 and not output.bias  # the output is added to the residual in place

    def forward(self, rows: Rows, rotation: Rotation, backend: AttentionBackend, layout: ActivationLayout) -> Tensor:
        """[u, hidden] to each token's mix of the values that it sees [t, heads * dim], for `output` to project."""
        num_tokens = len(rotation[0])
        heads = layout.trim(layout.column(rows, self.qkv), num_tokens)
        heads = heads.view(num_tokens, -1, self.dim)  # [t, heads + 2 kv_heads, dim]
        norm = self.head_norm() if self.head_norm is not None else None
        return backend.attend(self.index, heads, rotation, norm).flatten(1)

    def parts(self) -> Iterator[tuple[str, WeightPart]]:
        yield from self.qkv.parts()
        yield from self.output.parts()
        if self.head_norm is not None:
            yield from self.head_norm.parts()
