"""The attention seam: what a step's rows look like to attention, and what a backend does.

The runner calls `plan` once a step, the model calls `attend` once a layer. Knows no requests, no model, no kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from toka_async.arrays import Int32


@dataclass(slots=True, frozen=True)
class PrefixGroup:
    """Contiguous decoding rows whose first `num_pages` pages are the same (Hydragen, arXiv:2402.05099)."""

    first_row: int
    num_rows: int
    num_pages: int


@dataclass(slots=True, frozen=True)
class AttentionBatch:
    """The rows of one step: decoding rows (one token each) first, then chunks of prompts.

    num_decode: decoding rows; the other rows are chunks.
    query_lengths: int32 [rows] on the host, 1 for decoding rows; their sum is the number of tokens.
    context_lengths: int32 [rows] on the host: tokens a row has once this step's are written.
    contexts: int32 [rows] on the device: the same.
    slots: int64 [rows] on the device: which row of the page table is whose.
    page_table: int32 [slots, width] on the device; entries past a slot's pages are any valid page.
    write_indices: int64 [tokens] on the device: where each token's key and value go, page * page_size + offset.
    groups: shared prefixes among the decoding rows, in row order, not overlapping.
    """

    num_decode: int
    query_lengths: Int32
    context_lengths: Int32
    contexts: Tensor
    slots: Tensor
    page_table: Tensor
    write_indices: Tensor
    groups: tuple[PrefixGroup, ...] = ()


@dataclass(slots=True, frozen=True)
class QueryKeyNorm:
    """RMSNorm of every query and key head before their rotation: weight [heads + kv_heads, dim]."""

    weight: Tensor
    eps: float


class AttentionBackend(Protocol):
    """Paged causal attention over the KV cache that the backend was built on."""

    def plan(self, batch: AttentionBatch) -> None:
        """Prepare for one step; the attends that follow are of this batch."""
        ...

    def attend(
        self, layer: int, heads: Tensor, rotation: tuple[Tensor, Tensor], norm: QueryKeyNorm | None = None
    ) -> Tensor:
        """Norm and rotate queries and keys, write keys and values of the step's tokens, then attend.

        heads [tokens, heads + 2 kv_heads, dim]: queries, keys, values as projected. rotation: cos and signed sin, each
        [tokens, 1, dim] (`model.rope`). Returns [tokens, heads, dim].
        Writes come first, so that a row may read pages that another row of the same step fills.
        """
        ...


class GraphAttention(AttentionBackend, Protocol):
    """A backend whose attends of decoding rows can be captured in a CUDA graph, and replayed for other rows."""

    def plan_graph(self, batch: AttentionBatch, grouped: bool) -> None:
        """Prepare for attends that are captured: all rows decode, and the batch's device tensors stay where they are.

        Its lengths on the host mean nothing. `grouped`: replays may have groups of shared prefixes.
        """
        ...

    def set_groups(self, groups: tuple[PrefixGroup, ...]) -> None:
        """The groups of the next replays of grouped graphs, the largest of which was planned first."""
        ...
