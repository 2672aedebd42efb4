"""What computes recurrent layers, as a seam: plain torch on CPUs, kernels on GPUs. Knows no layers of a model."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from toka_async.arrays import Int32
from toka_async.attention.base import AttentionBatch, ChunkRows
from toka_async.kernels.delta.layer import DeltaWeights


class StateOps(Protocol):
    """Computes the layers over the states of a `StateCache`."""

    def plan(self, batch: AttentionBatch) -> None:
        """Prepares for one step: the following calls of `compute` are for this batch."""
        ...

    def compute(self, layer: int, inputs: Tensor, z: Tensor, gates: Tensor, weights: DeltaWeights) -> Tensor:
        """Computes a layer of a step, and leaves each row's state behind its last token.

        inputs: [t, channels]: queries, keys and values, head by head each. z: [t, values], the output's gate. gates:
        [t, 2 * value heads]: b, of which beta is the sigmoid, and a. A token's numbers are contiguous. Returns
        [t, values].
        """
        ...


class GraphStateOps(StateOps, Protocol):
    """Computes steps that are captured as well. See `GraphAttention` and `MixedAttention`."""

    def plan_graph(self, batch: AttentionBatch) -> None:
        """Prepares for a capture of decoding rows, whose slots are read from device memory."""
        ...

    def count_cells(self, num_tokens: int, num_rows: int) -> int:
        """Counts the numbers in which `describe` describes any step of so many tokens of so many rows."""
        ...

    def describe(self, cells: Int32, chunks: ChunkRows) -> None:
        """Writes into cells, all zeros, which chunks follow the decoding rows, and the states to keep."""
        ...

    def plan_mixed(self, batch: AttentionBatch, cells: Tensor) -> None:
        """Prepares for a capture of decoding rows and chunks, which are read from device memory."""
        ...
