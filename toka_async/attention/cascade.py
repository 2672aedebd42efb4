"""Decodes with FlashInfer for the prefixes that rows share, and with our own kernel for the rest.

FlashInfer's matrix products are the fastest where many rows read the same keys, our kernel where each row reads its own
without a plan. Our kernel continues from the prefix's result, so nothing is merged separately.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toka_async.attention.base import AttentionBatch, PrefixGroup
from toka_async.attention.copies import to_device
from toka_async.attention.flashinfer import WHOLE, Prefill, WrapperShape, select_rows, skip_pages
from toka_async.attention.query_tiles import make_prefix_spans
from toka_async.attention.row_decode import RowDecode
from toka_async.kernels.decode import Partial


@dataclass(slots=True, frozen=True)
class _PlannedPrefix:
    """wrapper: for the prefixes of the `grouped` rows."""

    wrapper: Any
    grouped: slice | Tensor


class CascadeDecode:
    """A `DecodePart` that uses our own kernel alone when there are no groups."""

    def __init__(self, shape: WrapperShape) -> None:
        self.cache = shape.cache
        self.device = shape.workspace.device
        self.rows = RowDecode(shape.cache, shape.num_heads, shape.scale)
        self.prefill = Prefill(shape)
        self.prefix: _PlannedPrefix | None = None

    def plan(self, batch: AttentionBatch, groups: tuple[PrefixGroup, ...], window: int) -> None:
        groups, pages = skip_pages(batch, groups, window)
        page_size = self.cache.page_size
        skip = (pages * page_size).astype(np.int32)
        lengths = batch.context_lengths[: batch.num_decode] - skip
        lengths = np.minimum(lengths, window) if window else lengths
        self.rows.plan(batch, lengths, to_device(skip, self.device) if groups else None, window)
        self.prefix = None
        if groups:
            self.prefix = _PlannedPrefix(
                self.prefill.plan(batch, make_prefix_spans(groups, page_size, WHOLE), 0),
                select_rows(np.flatnonzero(skip), lambda rows: to_device(rows, self.device)),
            )

    def run(self, layer: int, query: Tensor, output: Tensor, sinks: Tensor | None = None) -> None:
        prefix = None if self.prefix is None else self._attend_prefix(self.prefix, layer, query, output)
        self.rows.run(layer, query, output, prefix, sinks)

    def _attend_prefix(self, prefix: _PlannedPrefix, layer: int, query: Tensor, output: Tensor) -> Partial:
        """Attends grouped rows over their prefix, into `output`: the kernel reads it there before it writes.

        The kernel applies the scale of values to all of a row.
        """
        pages, key_scale = (self.cache.keys[layer], self.cache.values[layer]), self.cache.scales[layer].keys
        lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
        rows = prefix.grouped
        if isinstance(rows, slice):
            prefix.wrapper.run(query[rows], pages, k_scale=key_scale, out=output[rows], lse=lse[rows], return_lse=True)
        else:
            shared = query[rows]
            part, part_lse = prefix.wrapper.run(
                shared, pages, k_scale=key_scale, out=torch.empty_like(shared), return_lse=True
            )
            output.index_copy_(0, rows, part)
            lse.index_copy_(0, rows, part_lse)
        return Partial(output[None], lse[None])
