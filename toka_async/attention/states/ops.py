"""What computes recurrent layers, as a seam: plain torch on CPUs, kernels on GPUs. Knows no layers of a model."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from toka_async.attention.base import AttentionBatch
from toka_async.kernels.delta.layer import DeltaWeights


class StateOps(Protocol):
    """Computes the layers over the states of a `StateCache`."""

    def plan(self, batch: AttentionBatch) -> None:
        """Prepares for one step: the following calls of `compute` are for this batch."""
        ...

    def plan_graph(self, batch: AttentionBatch) -> None:
        """Prepares for a capture of decoding rows, whose slots are read from device memory."""
        ...

    def compute(self, layer: int, inputs: Tensor, z: Tensor, gates: Tensor, weights: DeltaWeights) -> Tensor:
        """Computes a layer of a step, and leaves each row's state behind its last token.

        inputs: [t, channels]: queries, keys and values, head by head each. z: [t, values], the output's gate. gates:
        [t, 2 * value heads]: b, of which beta is the sigmoid, and a. A token's numbers are contiguous. Returns
        [t, values].
        """
        ...
