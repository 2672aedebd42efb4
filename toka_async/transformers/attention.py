"""Our attention as a function of the `transformers` library: a layer's queries, keys and values go to a step's backend.

Knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from toka_async.attention.base import AttentionBackend

ATTENTION = "toka_async"
_LAYER = "toka_async_layer"  # the attribute of a module that attends


@dataclass(slots=True)
class StepAttention:
    """What the layers of a model share in a step. rotation: one that turns nothing, as models rotate by themselves."""

    backend: AttentionBackend | None = None
    rotation: tuple[Tensor, Tensor] | None = None


@dataclass(slots=True, frozen=True)
class LayerAttention:
    """The attention of one layer. index: in the stage. padding: what a value head lacks of the size of a key head.

    factor: of queries.
    """

    step: StepAttention
    index: int
    padding: int = 0
    factor: float = 1.0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        """[1, heads, t, dim] each to [1, t, heads, value dim]; queries and keys are rotated. sinks: [heads]."""
        step = self.step
        assert step.backend is not None
        assert step.rotation is not None
        if self.padding:
            value = F.pad(value, (0, self.padding))
        if self.factor != 1.0:
            query = query * self.factor
        heads = torch.cat((query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)), dim=2)[0]
        attended = step.backend.attend(self.index, heads, step.rotation, None, sinks)[None]
        return attended[..., : -self.padding] if self.padding else attended


def bind(module: nn.Module, layer: LayerAttention) -> None:
    """Has a module that attends call the layer's backend from now on."""
    setattr(module, _LAYER, layer)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The library's interface. s_aux: what it calls sinks.

    What else a model hands over, the probe has found to mean nothing, or in the spec.
    """
    return getattr(module, _LAYER).attend(query, key, value, s_aux), None


# Without a mask function of that name, models make no masks.
ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attend)
