"""A model of the `transformers` library in the place of our decoder: ids and positions in, states and logits out.

A step's tokens are one sequence of the library's; attention, which decides what each sees, is ours. The library's
layers are opaque, so a step's last layer is computed for all of its tokens, not only for those that are sampled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from toka_async.attention.base import AttentionBackend
from toka_async.checkpoint.division import StagePart, all_layers
from toka_async.checkpoint.foreign_spec import ForeignAttentionSpec
from toka_async.checkpoint.spec import ModelSpec
from toka_async.model.activation_layout import LayoutPolicy, Replicated
from toka_async.model.comm import Comm
from toka_async.model.decoder import Layer
from toka_async.model.matrices.matrix import MatrixUse
from toka_async.model.matrices.ops import Ops
from toka_async.model.matrices.part import WeightPart
from toka_async.transformers.attention import LayerAttention, StepAttention, bind
from toka_async.transformers.layers import find_decoder, find_layers, find_path, list_values, replace
from toka_async.transformers.names import CheckpointNames
from toka_async.transformers.parallel import divide
from toka_async.transformers.stage import cut_stage
from toka_async.transformers.vocabulary import (
    Head,
    VocabularyEmbedding,
    VocabularyHead,
    WholeHead,
    can_divide_vocabulary,
    make_vocabulary_matrix,
)


class ForeignDecoder(nn.Module):
    """A decoder-only transformer of another library, or one stage of it. Its parameters are unset.

    The layers of a stage are numbered from 0, as in its attention.
    """

    def __init__(self, model: Any, spec: ModelSpec, comm: Comm, ops: Ops, part: StagePart | None = None) -> None:
        """model: with its head; parameters are on the meta device, buffers are real. spec: the whole model's."""
        super().__init__()
        self.part = part = part or all_layers(spec)
        self.layouts = LayoutPolicy(Replicated(comm))
        self.embedding: nn.Module | None = None
        self.head: Head | None = None
        self._fp32 = spec.fp32_logits
        self._dtype: torch.dtype = model.dtype
        self._head_dim = spec.attention.head_dim
        self._names = CheckpointNames(model)
        self._step = StepAttention()
        decoder, path = find_decoder(model)
        embedding, head = (
            find_path(model, end) for end in (model.get_input_embeddings(), model.get_output_embeddings())
        )
        self._division = divide(model, comm, (embedding, head))
        self._bind_layers(model, spec)
        attentions = [layer.mixer.module for layer in spec.layers if isinstance(layer.mixer, ForeignAttentionSpec)]
        self._residuals = cut_stage(find_layers(model, attentions), part)
        self._replace_ends(model, embedding, head, comm, ops)
        replace(model, path, _GivenStates())
        self._decoder = decoder
        self._top = model
        self._path = path
        self._by_normal = {self._names.normalize(name): name for name, _ in self.parts()}

    def _bind_layers(self, model: nn.Module, spec: ModelSpec) -> None:
        for index, layer in enumerate(spec.layers[self.part.first : self.part.last]):
            mixer = layer.mixer
            assert isinstance(mixer, ForeignAttentionSpec)
            attention = LayerAttention(self._step, index, mixer.head_dim - mixer.value_dim, mixer.factor)
            bind(model.get_submodule(mixer.module), attention)

    def _replace_ends(self, model: Any, embedding_path: str, head_path: str, comm: Comm, ops: Ops) -> None:
        """Replaces embedding and head by ours where these compute the same; a stage has no other than its own."""
        embedding, head = model.get_submodule(embedding_path), model.get_submodule(head_path)
        tied, part = embedding.weight is head.weight, self.part
        if not can_divide_vocabulary(embedding, head):
            if part.is_first:
                self.embedding = embedding
            elif not (tied and part.is_last):
                replace(model, embedding_path, nn.Identity())
            if part.is_last:
                self.head = WholeHead(head, comm, fp32=self._fp32)
            else:
                replace(model, head_path, nn.Identity())
            return
        names = [self._names.rename(f"{path}.weight").removesuffix(".weight") for path in (embedding_path, head_path)]
        matrix = None
        if part.is_first:
            matrix = make_vocabulary_matrix(embedding, names[0], comm, ops, fp32=self._fp32)
            self.embedding = VocabularyEmbedding(matrix, self.layouts)
        replace(model, embedding_path, self.embedding or nn.Identity())
        if part.is_last:
            if matrix is None or not tied:
                matrix = make_vocabulary_matrix(head, names[0 if tied else 1], comm, ops, fp32=self._fp32)
            self.head = VocabularyHead(matrix)
        replace(model, head_path, self.head if isinstance(self.head, VocabularyHead) else nn.Identity())

    def forward(
        self, inputs: Tensor, positions: Tensor, attention: AttentionBackend, wanted: Tensor | None = None
    ) -> Tensor:
        """Returns hidden states [t, hidden] of all tokens, or [w, hidden] of the wanted ones; see `Decoder.forward`."""
        return self.finish(*self.begin(inputs, positions, attention), wanted)

    def begin(self, inputs: Tensor, positions: Tensor, attention: AttentionBackend) -> tuple[Tensor, Tensor]:
        """Computes all layers. Returns hidden states [t, hidden], and nothing more: [t, 0]."""
        step, residuals = self._step, self._residuals
        step.backend = attention
        cosine = torch.ones(len(inputs), 1, self._head_dim, dtype=self._dtype, device=inputs.device)
        step.rotation = cosine, torch.zeros_like(cosine)
        first = {"input_ids" if self.part.is_first else "inputs_embeds": inputs[None]}
        residuals.incoming = inputs[None]
        states = self._decoder(**first, position_ids=positions[None], use_cache=False)[0]
        if not self.part.is_last:
            assert residuals.outgoing is not None
            states = residuals.outgoing
        residuals.incoming = residuals.outgoing = None
        hidden: Tensor = states[0]
        return hidden, hidden[:, :0]

    def finish(self, attended: Tensor, residual: Tensor, wanted: Tensor | None = None) -> Tensor:  # noqa: ARG002
        return attended if wanted is None else attended.index_select(0, wanted)

    def rehearse(self) -> AbstractContextManager[None]:
        """See `Decoder.rehearse`. Computes all layers, as it is not known which of them launch the same kernels."""
        return nullcontext()

    def logits(self, hidden: Tensor) -> Tensor:
        """[s, hidden] to [s, vocab]; the last stage only. What the model does to its head's scores, its code does."""
        scores: Tensor = self._top(inputs_embeds=hidden[None], use_cache=False).logits
        return scores[0]

    def own_logits(self, hidden: Tensor) -> Tensor:
        """[s, hidden] to [s / ranks, vocab] of the rank's rows; s > 0 is a multiple of the tensor ranks."""
        assert self.head is not None
        self.head.own = True
        try:
            return self.logits(hidden)
        finally:
            self.head.own = False

    def uses(self) -> Iterator[MatrixUse]:
        """Yields how steps use the matrices that are ours."""
        if isinstance(self.head, VocabularyHead) and not self._fp32:  # torch computes products to float32
            yield MatrixUse(self.head.matrix, of_samples=True)

    def parts(self) -> Iterator[tuple[str, WeightPart]]:
        """Yields every tensor that a checkpoint must have for this decoder, by name, and where it goes."""
        seen = set[int]()  # tied tensors, of which a checkpoint has the first
        for path, module in self._list_modules():
            if isinstance(module, (VocabularyEmbedding, VocabularyHead)):
                if id(module.matrix) not in seen:
                    yield from module.matrix.parts()
                seen |= {id(module.matrix)}
                continue
            for name, values in list_values(module):
                if id(values) not in seen:
                    seen.add(id(values))
                    shares = self._division.find(module, name, values)
                    yield from self._names.name_parts(f"{path}.{name}", values.data, shares)

    def _list_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yields the modules by their names in the whole model, but ours inside of others of ours."""
        for root, prefix in ((self._decoder, self._path), (self._top, "")):
            for path, module in root.named_modules(prefix=prefix):
                if not path.endswith(".matrix"):
                    yield path, module

    def list_layers(self) -> list[Layer]:
        """Returns none: the layers are not ours."""
        return []

    def find_part(self, name: str) -> str:
        """Returns the name among `parts` of a checkpoint's tensor, which may have been given another one."""
        return self._by_normal.get(self._names.normalize(name), name)

    def needs_place(self, name: str) -> bool:
        """Tells whether a checkpoint's tensor without a place is a mistake: it is of a layer of this stage."""
        return self._names.needs_place(name, self.part)

    def materialize(self, device: torch.device) -> None:
        """Allocates the parameters, which are on the meta device, unset on another, and moves buffers there."""
        made: dict[int, nn.Parameter] = {}  # by the identity of what they replace, as some are tied
        for module in self.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.is_meta:
                    if id(parameter) not in made:
                        values = torch.empty_like(parameter, device=device)
                        made[id(parameter)] = nn.Parameter(values, requires_grad=False)
                    module._parameters[name] = made[id(parameter)]
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)


class _GivenOutput(BaseModelOutputWithPast):
    """Hidden states, and None for what else a model with a head looks for."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _GivenStates(nn.Module):
    """In the place of the decoder of a model with a head: passes on hidden states instead of computing them."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _GivenOutput:
        return _GivenOutput(last_hidden_state=inputs_embeds)
