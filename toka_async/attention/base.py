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
    page_table: int32 [rows, width] on the device; entries past a row's pages are any valid page.
    write_indices: int64 [tokens] on the device: where each token's key and value go, page * page_size + offset.
    groups: shared prefixes among the decoding rows, in row order, not overlapping.
    """

    num_decode: int
    query_lengths: Int32
    context_lengths: Int32
    page_table: Tensor
    write_indices: Tensor
    groups: tuple[PrefixGroup, ...] = ()


class AttentionBackend(Protocol):
    """Paged causal attention over the KV cache that the backend was built on."""

    def plan(self, batch: AttentionBatch) -> None:
        """Prepare for one step; the attends that follow are of this batch."""
        ...

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write keys and values of the step's tokens, then attend.

        query [tokens, heads, dim]; key, value [tokens, kv_heads, dim], rope applied. Returns [tokens, heads, dim].
        Writes come first, so that a row may read pages that another row of the same step fills.
        """
        ...
