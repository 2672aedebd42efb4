"""A layer's second half, of which there are several kinds: `Feed`. A new kind is an entry in `FEEDS`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from toka_async.checkpoint.experts_spec import ExpertsFeedSpec
from toka_async.checkpoint.layer_spec import DenseFeedSpec, LayerSpec
from toka_async.model.activation_layout import ActivationLayout
from toka_async.model.comm import Comm
from toka_async.model.dense_feed import DenseFeed
from toka_async.model.experts_feed import ExpertsFeed
from toka_async.model.layers import InputNorm
from toka_async.model.matrices.matrix import MatrixUse
from toka_async.model.matrices.ops import Ops
from toka_async.model.matrices.part import WeightPart


class Feed(Protocol):
    """An nn.Module that computes what a layer adds after attention."""

    @property
    def adds(self) -> bool:
        """Whether the result is added to the residual in place, so that the next norm has nothing to add.

        Never if the feed was built with `adds=False`.
        """
        ...

    def __call__(
        self, hidden: Tensor | None, residual: Tensor, norm: InputNorm, layout: ActivationLayout
    ) -> tuple[Tensor | None, Tensor]:
        """Computes the feed of norm(residual + hidden), [u, hidden] each; a hidden of None counts as zeros.

        Returns what is yet to be added to the residual, None for nothing, and the residual, which has `hidden` added.
        May overwrite the given residual.
        """
        ...

    def uses(self, normed: torch.dtype | None) -> Iterator[MatrixUse]:
        """Yields how steps use the matrices.

        normed: the dtype of the factors of the norm before them, if that norm has nothing to add; otherwise None.
        """
        ...

    def parts(self) -> Iterator[tuple[str, WeightPart]]:
        """Yields the tensors of a checkpoint by their names in the layer, those without values on this rank as well."""
        ...


# Makes the feed of a layer from its spec and the residual's size. The last: whether it may add in place.
FEEDS: dict[type, Callable[[LayerSpec, int, Comm, Ops, bool], Feed]] = {
    DenseFeedSpec: DenseFeed,
    ExpertsFeedSpec: ExpertsFeed,
}


def build_feed(layer: LayerSpec, hidden_size: int, comm: Comm, ops: Ops, adds: bool = True) -> Feed:
    """Builds unset parameters of torch's default dtype on its default device.

    adds: the feed may add its result to the residual in place; otherwise it returns it.
    """
    return FEEDS[type(layer.feed)](layer, hidden_size, comm, ops, adds)
