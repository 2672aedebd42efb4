"""The decoder of all families: token ids and positions in, hidden states and logits out.

Shapes: t tokens of all rows of a step, one after the other. The attention backend decides which tokens see which, an
`ActivationLayout` how activations lie on tensor ranks (u, v). Each half of a layer adds its input to the residual as it
norms it, and returns what the next half adds. A decoder may be one stage of a pipeline: some of the layers, with the
residual coming in or going out in place of ids and norm. Knows no rows, no pages, no files; families differ only by
their `ModelSpec`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property, partial
from itertools import chain, pairwise
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from toka_async.attention.base import AttentionBackend
from toka_async.attention.rope import Rope
from toka_async.checkpoint.attention_spec import AttentionSpec
from toka_async.checkpoint.division import StagePart, all_layers
from toka_async.checkpoint.names import find_text_name, is_of_other_part
from toka_async.checkpoint.rope_spec import RopeSpec
from toka_async.checkpoint.spec import ModelSpec
from toka_async.model.activation_layout import ActivationLayout, LayoutPolicy, Replicated
from toka_async.model.attention import Rotation
from toka_async.model.comm import Comm
from toka_async.model.feed import build_feed
from toka_async.model.layers import (
    LayerInput,
    LayerInputs,
    NoNorm,
    ResultNorm,
    ResultScale,
    RMSNorm,
    VocabularyMatrix,
    add_both,
)
from toka_async.model.matrices.matrix import MatrixUse
from toka_async.model.matrices.ops import Ops
from toka_async.model.matrices.part import WeightPart, make_unset
from toka_async.model.matrices.share import share_of, whole_of
from toka_async.model.mixer import build_mixer


class RankModel(Protocol):
    """What a start, weights and trainers need of a rank's model, whoever computes its layers: an nn.Module.

    It is a decoder-only model, or one stage of it. `Decoder` says what the methods do.
    """

    @property
    def layouts(self) -> LayoutPolicy: ...

    @property
    def part(self) -> StagePart: ...

    @property
    def embedding(self) -> object | None:
        """None: another stage has it."""
        ...

    @property
    def head(self) -> object | None:
        """None: another stage has it."""
        ...

    def forward(
        self, inputs: Tensor, positions: Tensor, attention: AttentionBackend, wanted: Tensor | None = None
    ) -> Tensor: ...

    def begin(self, inputs: Tensor, positions: Tensor, attention: AttentionBackend) -> tuple[Tensor, Tensor]: ...

    def finish(self, attended: Tensor, residual: Tensor, wanted: Tensor | None = None) -> Tensor: ...

    def rehearse(self) -> AbstractContextManager[None]: ...

    def logits(self, hidden: Tensor) -> Tensor: ...

    def own_logits(self, hidden: Tensor) -> Tensor: ...

    def uses(self) -> Iterator[MatrixUse]: ...

    def parts(self) -> Iterator[tuple[str, WeightPart]]: ...

    def find_part(self, name: str) -> str:
        """Returns the name among `parts` of a checkpoint's tensor, which may have another name there."""
        ...

    def needs_place(self, name: str) -> bool:
        """Tells whether a checkpoint's tensor that is not among `parts` is a mistake: it belongs to these layers."""
        ...

    def list_layers(self) -> Sequence[Layer]:
        """Returns the layers that are ours."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def buffers(self) -> Iterator[Tensor]: ...


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
        self.num_heads = share_of(spec.attention.num_heads, comm).size  # the rank's query heads
        make_vocabulary = partial(
            VocabularyMatrix,
            comm=comm,
            ops=ops,
            fp32=spec.fp32_logits,
            scale=spec.logits_scale,
            soft_cap=spec.logits_soft_cap,
        )
        self.embedding = make_vocabulary(spec.embedding_matrix) if part.is_first else None
        # Rounded as the weights are, like the models that have one were trained.
        self.embedding_scale = torch.tensor(spec.embedding_scale, device="cpu").item()
        own_input = spec.layers[part.first].input
        self.input_size = 0 if own_input is None else own_input.size
        self.inputs = LayerInputs(spec, comm, ops) if spec.layer_inputs and part.is_first else None
        self.passed_sizes = [spec.hidden_size, spec.layer_inputs]
        turns = [_find_turn(spec, number) for number in range(part.first, part.last)]
        ropes = list(dict.fromkeys(turns))
        self.ropes = nn.ModuleList(Rope(rope, dim, ops.compute_rotation) for rope, dim in ropes)
        indices = _number_mixers(spec, part)
        attentions = ((number, layer.mixer) for number, layer in enumerate(spec.layers))
        self.readers = {n for n, each in attentions if isinstance(each, AttentionSpec) and each.reads_back}
        self.layers = nn.ModuleList(
            Layer(spec, number, index, ropes.index(turn), comm, ops)
            for number, (index, turn) in enumerate(zip(indices, turns, strict=True), part.first)
        )
        self._specs_and_turns = list(zip(spec.layers[part.first : part.last], turns, strict=True))
        self._before_last: Sequence[int] = range(part.size - 1)  # indices of the layers that steps compute
        self.norm = build_norm(spec, ops) if part.is_last else None
        self.head: VocabularyMatrix | None = None
        if part.is_last:
            tied = self.embedding if spec.tie_embeddings else None
            self.head = tied or make_vocabulary(spec.head_matrix)

    def forward(
        self, inputs: Tensor, positions: Tensor, attention: AttentionBackend, wanted: Tensor | None = None
    ) -> Tensor:
        """Returns normalised hidden states [t, hidden] of all tokens, or [w, hidden] of the wanted ones.

        inputs: token ids, int64 [t]; a later stage takes the output of the one before. A stage that is not the last
        returns the residual [t, hidden] before the next layer's norm, and beside it the inputs of all layers, if they
        have some. positions: int64 [t]. wanted: int64 [w], indices
        of tokens; the others leave their keys and values in every layer, which is all that later tokens need of them,
        and skip the rest of the last layer.
        """
        return self.finish(*self.begin(inputs, positions, attention), wanted)

    def begin(self, inputs: Tensor, positions: Tensor, attention: AttentionBackend) -> tuple[Tensor, Tensor]:
        """Computes everything up to the last layer's attention: the part of a step in which all tokens are needed.

        Returns what each token attends to, [t, the rank's heads * dim], and the residual [u, hidden], beside which are
        the inputs of layers that `finish` needs, if they have some.
        """
        layout = self.layouts.choose(len(inputs))
        first, of_layers = self._enter(inputs, layout)
        rotations = self.rotate(positions, first.dtype)
        hidden: Tensor | None = first
        residual: Tensor | None = None
        layers = self.list_layers()
        for index in self._before_last:
            own = self._take_input(of_layers, self.part.first + index)
            hidden, residual = layers[index](hidden, residual, rotations, attention, layout, own)
        attended, residual = layers[-1].attend(hidden, residual, rotations, attention, layout)
        if of_layers is None:
            return attended, residual
        passed = self._take_input(of_layers, self.part.last - 1) if self.part.is_last else of_layers
        assert passed is not None
        return attended, torch.cat((residual, passed), 1)

    def finish(self, attended: Tensor, residual: Tensor, wanted: Tensor | None = None) -> Tensor:
        """Computes what follows `begin`, of all tokens or those wanted; see `forward`. May overwrite the residual."""
        num_tokens = len(attended)
        layout = self.layouts.choose(num_tokens)
        of_layers: Tensor | None = None
        own: Tensor | None = None
        if self.input_size:
            residual, of_layers = residual.tensor_split([self.passed_sizes[0]], 1)
            residual, own = residual.contiguous(), of_layers
            if not self.part.is_last:
                own = self._take_input(of_layers, self.part.last - 1)
        hidden, residual = self.list_layers()[-1].finish(attended, residual, layout, wanted, own)
        if self.norm is None:
            total = residual if hidden is None else residual + hidden
            passed = total if of_layers is None else torch.cat((total, of_layers), 1)
            return layout.trim(layout.gather(passed), num_tokens)
        normed: Tensor = self.norm(hidden, residual)[0]
        return layout.trim(layout.gather(normed), num_tokens) if wanted is None else normed

    @contextmanager
    def rehearse(self) -> Iterator[None]:
        """Within, steps compute few layers, which launch all kernels that the others do. Their results mean nothing.

        Each kind of layer is computed after each kind that it follows: its first kernels depend on what that returns.
        The first layer, which has no residual yet, and the last, which computes wanted tokens, are among them.
        """
        usual, self._before_last = self._before_last, self._rehearsed
        try:
            yield
        finally:
            self._before_last = usual

    @cached_property
    def _rehearsed(self) -> list[int]:
        """Indices of the layers before the last that a rehearsal computes. Weights must be in their final form."""
        kinds = [self._describe_kind(index) for index in range(self.part.size)]
        pairs: list[object] = []
        indices = set[int]()
        for index, pair in enumerate(pairwise(kinds)):
            if pair not in pairs:
                pairs.append(pair)
                indices |= {index, index + 1}
        return sorted(indices - {self.part.size - 1})

    def _describe_kind(self, index: int) -> object:
        """Describes what a layer's kernels depend on: its specification, and how its weights are stored."""
        layer = self.list_layers()[index]
        values = chain(layer.named_parameters(), layer.named_buffers())
        return self._specs_and_turns[index], [(name, value.shape, value.dtype) for name, value in values]

    def _enter(self, inputs: Tensor, layout: ActivationLayout) -> tuple[Tensor, Tensor | None]:
        """Returns the first residual [u, hidden], and the inputs of all layers [u, n], if they have some."""
        if self.embedding is None:
            residual, of_layers = torch.split(layout.take_own(inputs), self.passed_sizes, 1)
            return residual.contiguous(), of_layers if self.input_size else None
        embedded = self._embed(inputs, layout)
        return embedded, None if self.inputs is None else self.inputs(inputs, embedded, layout)

    def _take_input(self, of_layers: Tensor | None, number: int) -> Tensor | None:
        """Takes a layer's [u, size] of the inputs of all layers. number: of the layer in the model."""
        return None if of_layers is None else of_layers[:, number * self.input_size : (number + 1) * self.input_size]

    def _embed(self, token_ids: Tensor, layout: ActivationLayout) -> Tensor:
        assert self.embedding is not None
        embedded = self.embedding.embed(token_ids, layout)
        return embedded if self.embedding_scale == 1 else embedded * self.embedding_scale

    def rotate(self, positions: Tensor, dtype: torch.dtype) -> list[Rotation]:
        """Turns positions [t] into what each rope's layers rotate by."""
        rotations = []
        for rope in cast(list[Rope], list(self.ropes)):
            cos, sin = rope(positions, dtype)
            rotations.append(Rotation(cos, sin, rope.compute_growth(positions, dtype)))
        return rotations

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
        if self.inputs is not None:
            yield from self.inputs.parts()
        for index, layer in enumerate(self.list_layers(), self.part.first):
            for name, part in layer.parts():
                yield f"model.layers.{index}.{name}", part
        if self.norm is not None:
            yield "model.norm.weight", self.norm.part()
        if self.head is not None and self.head is not self.embedding:
            yield from self.head.parts()

    def find_part(self, name: str) -> str:
        """See `RankModel`."""
        return find_text_name(name)

    def needs_place(self, name: str) -> bool:
        """Tells whether a checkpoint's tensor is in the layers; others (a tied or value head) are harmless."""
        match = re.match(r"model\.layers\.(\d+)\.(self_attn\.[kv]_)?", find_text_name(name))
        if match is None or not self.part.first <= int(match[1]) < self.part.last:
            return False
        if match[2] and int(match[1]) in self.readers:
            return False  # published checkpoints have keys and values that nothing reads
        return not name.endswith("rotary_emb.inv_freq") and not is_of_other_part(name)


class Layer(nn.Module):
    """A mixer of tokens and a feed, each with a residual around, and norms before or after."""

    def __init__(self, spec: ModelSpec, number: int, index: int, rotation: int, comm: Comm, ops: Ops) -> None:
        """number: of the layer in the model. index: see `build_mixer`. rotation: which of the step's it takes."""
        super().__init__()
        layer = spec.layers[number]
        self.names = layer.norms
        self.scalar_name = layer.scalar
        self.rotation = rotation
        self.mixer_norm = build_norm(spec, ops) if layer.norms.before_mixer else NoNorm()
        self.mixer = build_mixer(spec, number, index, comm, ops)
        self.mixer_result = build_result(spec, layer.norms.after_mixer, ops)
        # The output is added to the residual in place.
        self.adds = comm.size == 1 and self.mixer.output.bias is None and self.mixer_result is None
        self.feed_norm = build_norm(spec, ops) if layer.norms.before_feed else NoNorm()
        self.feed_result = build_result(spec, layer.norms.after_feed, ops)
        self.feed = build_feed(layer, spec.hidden_size, comm, ops, adds=self.feed_result is None)
        self.input = LayerInput(spec, layer, ops) if layer.input is not None else None
        self.is_alone = comm.size == 1
        self.scalar = make_unset(1) if layer.scalar else None

    def forward(
        self,
        hidden: Tensor | None,
        residual: Tensor | None,
        rotations: Sequence[Rotation],
        backend: AttentionBackend,
        layout: ActivationLayout,
        own: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        """Returns what to add to the residual, and the residual: [u, hidden] each. May overwrite the given residual.

        own: the layer's input [u, size], if it has one.
        """
        return self.finish(*self.attend(hidden, residual, rotations, backend, layout), layout, own=own)

    def attend(
        self,
        hidden: Tensor | None,
        residual: Tensor | None,
        rotations: Sequence[Rotation],
        backend: AttentionBackend,
        layout: ActivationLayout,
    ) -> tuple[Tensor, Tensor]:
        """Adds [u, hidden] to the residual. Returns what the mixer makes of tokens, and the residual. See `Mixer`."""
        return self.mixer(hidden, residual, self.mixer_norm, rotations[self.rotation], backend, layout)

    def finish(
        self,
        mixed: Tensor,
        residual: Tensor,
        layout: ActivationLayout,
        wanted: Tensor | None = None,
        own: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        """Computes what follows the mixer, for all tokens or the wanted ones [w]. May overwrite the given residual.

        Wanted tokens are few: once the others have left, every rank has all of them.
        """
        if wanted is not None:
            mixed, residual = mixed.index_select(0, wanted), layout.gather(residual).index_select(0, wanted)
            own = None if own is None else layout.gather(own.contiguous()).index_select(0, wanted)
            layout = layout.replicated
        output = self.mixer.output
        rows = output.take(layout.pad(mixed))
        hidden: Tensor | None
        if self.mixer_result is None:
            hidden, residual = layout.row(rows, output, residual)
        else:
            hidden = self.mixer_result(layout.sum(rows, output))
        hidden, residual = self.feed(hidden, residual, self.feed_norm, layout)
        if self.feed_result is not None:
            assert hidden is not None
            hidden = self.feed_result(hidden)
        if self.input is not None:
            assert own is not None
            residual = add_both(hidden, residual)
            hidden = self.input(residual, own)
        if self.scalar is not None:
            return None, add_both(hidden, residual) * self.scalar
        return hidden, residual

    def uses(self) -> Iterator[MatrixUse]:
        yield from self.mixer.uses(find_normed(self.mixer_norm, self.feed.adds))  # of the layer before, like this one
        yield MatrixUse(self.mixer.output, adds=self.adds)
        yield from self.feed.uses(find_normed(self.feed_norm, self.adds))
        if self.input is not None and self.is_alone:  # ranks must round alike, but each chooses its own fastest product
            yield from self.input.uses()

    def parts(self) -> Iterator[tuple[str, WeightPart]]:
        """Yields the tensors by their names in the layer."""
        names = self.names
        for name, norm in (
            (names.before_mixer, self.mixer_norm),
            (names.after_mixer, self.mixer_result),
            (names.before_feed, self.feed_norm),
            (names.after_feed, self.feed_result),
        ):
            if isinstance(norm, RMSNorm | ResultNorm):
                yield f"{name}.weight", norm.part()
        if self.scalar is not None:
            yield self.scalar_name, WeightPart(self.scalar.data, (whole_of(1),), constant=1.0)
        yield from self.mixer.parts()
        yield from self.feed.parts()
        if self.input is not None:
            yield from self.input.parts()


def _number_mixers(spec: ModelSpec, part: StagePart) -> list[int]:
    """Returns of each layer of a stage the number of its mixer among those of its kind, see `build_mixer`.

    Attention that reads another layer's keys has that layer's number.
    """
    counts = Counter[type]()
    numbers: list[int] = []
    for layer in spec.layers[part.first : part.last]:
        mixer = layer.mixer
        if isinstance(mixer, AttentionSpec) and mixer.reads_back:
            numbers.append(numbers[-mixer.reads_back])
            continue
        numbers.append(counts[type(mixer)])
        counts[type(mixer)] += 1
    return numbers


def _find_turn(spec: ModelSpec, number: int) -> tuple[RopeSpec | None, int]:
    """Returns a layer's rope and the size of the heads that it turns; any layer's that has one, if it has none."""
    mixer = spec.layers[number].mixer
    attention = mixer if isinstance(mixer, AttentionSpec) else spec.attention
    return attention.rope, attention.head_dim


def find_normed(norm: RMSNorm | NoNorm, adds: bool) -> torch.dtype | None:
    """Returns the dtype of the factors of a norm that is left to the product after it; None: of none.

    adds: what comes before the norm is added to the residual already.
    """
    return norm.weight.dtype if adds and isinstance(norm, RMSNorm) else None


def build_norm(spec: ModelSpec, ops: Ops) -> RMSNorm:
    """Builds a norm of the residual."""
    return RMSNorm(spec.hidden_size, spec.norm.eps, ops, spec.norm.adds_one)


def build_result(spec: ModelSpec, norm: str, ops: Ops) -> ResultNorm | ResultScale | None:
    """Builds what the result of half of a layer passes through before it is added; None: it is added as it is.

    norm: its name; empty: there is none.
    """
    if norm:
        assert spec.residual_scale == 1, "a result is normed or scaled"
        return ResultNorm(build_norm(spec, ops))
    return None if spec.residual_scale == 1 else ResultScale(spec.residual_scale)
