"""A layer's first half, in which tokens see each other: `Mixer`. A new kind is an entry in `MIXERS`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from toka_async.attention.base import AttentionBackend
from toka_async.checkpoint.attention_spec import AttentionSpec
from toka_async.checkpoint.delta_net_spec import DeltaNetSpec
from toka_async.checkpoint.spec import ModelSpec
from toka_async.model.activation_layout import ActivationLayout
from toka_async.model.attention import Attention, Rotation
from toka_async.model.comm import Comm
from toka_async.model.delta_net import DeltaNet
from toka_async.model.layers import InputNorm
from toka_async.model.matrices.matrix import Matrix, MatrixUse
from toka_async.model.matrices.ops import Ops
from toka_async.model.matrices.part import WeightPart


class Mixer(Protocol):
    """An nn.Module that computes what a layer adds before its feed, up to the last product."""

    @property
    def output(self) -> Matrix:
        """The last product's matrix."""
        ...

    def __call__(
        self,
        hidden: Tensor | None,
        residual: Tensor | None,
        norm: InputNorm,
        rotation: Rotation,
        backend: AttentionBackend,
        layout: ActivationLayout,
    ) -> tuple[Tensor, Tensor]:
        """Mixes norm(residual + hidden), [u, hidden] each, of which one may be None and counts as zeros.

        rotation: of the step's t tokens. Returns what `output` multiplies, [t, the rank's inputs of it], and the
        residual, which has `hidden` added.
        """
        ...

    def uses(self, normed: torch.dtype | None) -> Iterator[MatrixUse]:
        """Yields how steps use the matrices but the output.

        normed: the dtype of the factors of the norm before them, if that norm has nothing to add; otherwise None.
        """
        ...

    def parts(self) -> Iterator[tuple[str, WeightPart]]:
        """Yields the tensors of a checkpoint by their names in the layer."""
        ...


# Makes the mixer of a layer of a model from the layer's number, and its number among those of its stage of that kind.
MIXERS: dict[type, Callable[[ModelSpec, int, int, Comm, Ops], Mixer]] = {
    AttentionSpec: Attention,
    DeltaNetSpec: DeltaNet,
}


def build_mixer(spec: ModelSpec, number: int, index: int, comm: Comm, ops: Ops) -> Mixer:
    """Builds unset parameters of torch's default dtype on its default device."""
    return MIXERS[type(spec.layers[number].mixer)](spec, number, index, comm, ops)
