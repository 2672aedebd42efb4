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
from toka_async.attention.flashinfer import WHOLE, Prefill, WrapperShape, is_seen
from toka_async.attention.query_tiles import make_prefix_spans
from toka_async.attention.triton import PartialMemory, TritonDecode
from toka_async.kernels.decode import Partial, Splits, decode_attention


@dataclass(slots=True, frozen=True)
class _CascadePlan:
    """skip: int32 [rows], keys of the prefix. prefix: a wrapper for the `grouped` rows. splits: of a row's own keys."""

    batch: AttentionBatch
    window: int
    skip: Tensor
    prefix: Any
    grouped: slice | Tensor
    splits: Splits
    order: Tensor | None


class CascadeDecode:
    """A `DecodePart` that uses our own kernel alone when there are no groups."""

    def __init__(self, shape: WrapperShape) -> None:
        self.shape = shape
        self.cache = shape.cache
        memory = PartialMemory(shape.workspace.device, 1)  # it computes no prefixes
        self.own = TritonDecode(shape.cache, shape.num_heads, shape.scale, memory=memory)
        self.prefill = Prefill(shape)
        self.step: _CascadePlan | None = None

    def plan(self, batch: AttentionBatch, groups: tuple[PrefixGroup, ...], window: int) -> None:
        groups = tuple(group for group in groups if is_seen(batch, group, window))
        if not groups:
            self.step = None
            self.own.plan(batch, (), window)
            return
        page_size = self.cache.page_size
        skip = np.zeros(batch.num_decode, dtype=np.int32)
        for group in groups:
            skip[group.first_row : group.first_row + group.num_rows] = group.num_pages * page_size
        lengths = batch.context_lengths[: batch.num_decode] - skip
        splits, order = self.own.divide_work(np.minimum(lengths, window) if window else lengths)
        rows = np.flatnonzero(skip)
        is_run = len(rows) == rows[-1] - rows[0] + 1
        device = self.shape.workspace.device
        self.step = _CascadePlan(
            batch,
            window,
            to_device(skip, device),
            self.prefill.plan(batch, make_prefix_spans(groups, page_size, WHOLE), 0),
            slice(int(rows[0]), int(rows[-1]) + 1) if is_run else to_device(rows.astype(np.int32), device),
            splits,
            order,
        )

    def run(self, layer: int, query: Tensor, output: Tensor) -> None:
        step = self.step
        if step is None:
            self.own.run(layer, query, output)
            return
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        decode_attention(
            query,
            keys,
            values,
            step.batch.page_table,
            step.batch.slots,
            step.batch.contexts,
            self.own.memory.list_rows(len(query)) if step.order is None else step.order,
            output,
            self.shape.scale,
            step.window,
            step.skip,
            self._attend_prefix(step, (keys, values), query, output),
            _make_partial(step.splits.count, query) if step.splits.count > 1 else None,
            step.splits.least,
        )

    def _attend_prefix(
        self, step: _CascadePlan, pages: tuple[Tensor, Tensor], query: Tensor, output: Tensor
    ) -> Partial:
        """Attends grouped rows over their prefix, into `output`: the kernel reads it there before it writes."""
        lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
        rows = step.grouped
        if isinstance(rows, slice):
            step.prefix.run(query[rows], pages, out=output[rows], lse=lse[rows], return_lse=True)
        else:
            shared = query[rows]
            part, part_lse = step.prefix.run(shared, pages, out=torch.empty_like(shared), return_lse=True)
            output.index_copy_(0, rows.long(), part)
            lse.index_copy_(0, rows.long(), part_lse)
        return Partial(output[None], lse[None])


def _make_partial(splits: int, query: Tensor) -> Partial:
    shape = (splits, *query.shape)
    return Partial(
        torch.empty(shape, dtype=torch.float32, device=query.device),
        torch.empty(shape[:-1], dtype=torch.float32, device=query.device),
    )
