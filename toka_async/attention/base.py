"""How a step's rows look to attention, and what an attention backend does.

The runner calls `plan` once a step, the model calls `attend` once a layer. Knows no requests, no model and no kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from toka_async.arrays import Int32, Int64


@dataclass(slots=True, frozen=True)
class PrefixGroup:
    """Contiguous decoding rows whose first `num_pages` pages are the same (Hydragen, arXiv:2402.05099)."""

    first_row: int
    num_rows: int
    num_pages: int


@dataclass(slots=True, frozen=True)
class ChunkStates:
    """What layers with a recurrent state must know of the chunks, on the host.

    slots: of each chunk. saves: chunk, tokens of it, and the snapshot in which its state after them is kept.
    """

    slots: Int32
    saves: tuple[tuple[int, int, int], ...] = ()


@dataclass(slots=True, frozen=True)
class WindowPages:
    """Where layers with a window keep a batch's keys and values: see `AttentionBatch`, in numbers of window pages.

    Entries of pages that no token of the batch sees through the window are any valid window page.
    """

    page_table: Tensor
    write_indices: Tensor


@dataclass(slots=True, frozen=True)
class ChunkRows:
    """The chunks of a step that a graph of `num_tokens` and `num_rows` computes, on the host.

    They follow `num_decode` decoding rows. lengths, contexts: of each chunk, see `AttentionBatch`.
    """

    num_tokens: int
    num_rows: int
    num_decode: int
    lengths: Int32
    contexts: Int64
    states: ChunkStates


@dataclass(slots=True, frozen=True)
class AttentionBatch:
    """The rows of one step: decoding rows (one token each) first, then chunks of prompts.

    num_decode: the number of decoding rows. query_lengths: int32 [rows] on the host, 1 for decoding rows; their sum is
    the number of tokens. context_lengths: int32 [rows] on the host, tokens of a row once this step's are written.
    contexts: the same on the device. slots: int64 [rows] on the device, each row's row of the page table. page_table:
    int32 [slots, width] on the device; entries past a slot's pages are any valid page. write_indices: int64 [tokens] on
    the device, where each token's key and value go: page * page_size + offset. groups: shared prefixes among the
    decoding rows, in row order, not overlapping. states: None: no layer has any, or nothing but rows that decode.
    windows: None: all layers have the same pages.
    """

    num_decode: int
    query_lengths: Int32
    context_lengths: Int32
    contexts: Tensor
    slots: Tensor
    page_table: Tensor
    write_indices: Tensor
    groups: tuple[PrefixGroup, ...] = ()
    states: ChunkStates | None = None
    windows: WindowPages | None = None

    def of_windows(self) -> AttentionBatch:
        """Returns the batch for layers with a window."""
        windows = self.windows
        if windows is None:
            return self
        return replace(self, page_table=windows.page_table, write_indices=windows.write_indices)


@dataclass(slots=True, frozen=True)
class QueryKeyNorm:
    """RMSNorm of every query and key head before their rotation.

    weight: [heads + kv_heads, dim], of the heads' dtype, or float32, which then rounds nothing before it.
    """

    weight: Tensor
    eps: float


class AttentionBackend(Protocol):
    """Paged causal attention over the KV cache that the backend was built on."""

    def plan(self, batch: AttentionBatch) -> None:
        """Prepares for one step: the following calls of `attend` are for this batch."""
        ...

    def attend(
        self,
        layer: int,
        heads: Tensor,
        rotation: tuple[Tensor, Tensor],
        norm: QueryKeyNorm | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Normalizes and rotates queries and keys, writes the tokens' keys and values, then attends.

        heads [tokens, heads + 2 kv_heads, dim]: queries, keys, values as projected; or queries alone [tokens, heads,
        dim], which attend to what an earlier call for the same layer has written. rotation: cos and signed sin, each
        [tokens, 1, turned] (`model.rope`). sinks [heads]: of each head a further logit that takes part in the softmax,
        without a value (arXiv:2309.17453); either all layers have them or none. Returns [tokens, heads, dim]. A row may
        read what another row writes.
        """
        ...


class CapturedAttention(AttentionBackend, Protocol):
    """A backend that can be captured in CUDA graphs and replayed for other rows."""

    def set_groups(self, groups: tuple[PrefixGroup, ...]) -> None:
        """Sets the groups of the next replays of grouped graphs. The largest such graph must be planned first."""
        ...


class GraphAttention(CapturedAttention, Protocol):
    """Captures attention of decoding rows alone."""

    def plan_graph(self, batch: AttentionBatch, grouped: bool) -> None:
        """Prepares for a capture: all rows decode, and the batch's device tensors stay where they are.

        The lengths on the host mean nothing. `grouped`: replays may have groups of shared prefixes.
        """
        ...


class MixedAttention(CapturedAttention, Protocol):
    """Captures attention of decoding rows and chunks of prompts together."""

    def count_chunk_cells(self, num_tokens: int, num_rows: int) -> int:
        """Counts the numbers in which `describe_chunks` describes any step of so many tokens of so many rows."""
        ...

    def describe_chunks(self, cells: Int32, chunks: ChunkRows) -> None:
        """Writes into cells, all zeros, which chunks follow the decoding rows."""
        ...

    def plan_mixed(self, batch: AttentionBatch, grouped: bool, chunks: Tensor) -> None:
        """Prepares for a capture. The batch's device tensors and the cells `chunks` are refilled before each replay.

        `num_decode` is the number of rows, decoding or not: a replay has the decoding rows first, with their contexts;
        the other rows' contexts are 0. The lengths on the host mean nothing. `grouped`: replays follow `set_groups`.
        """
        ...
