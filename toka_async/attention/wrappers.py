"""Plans FlashInfer's wrappers without waiting for the device, several steps ahead.

A wrapper's plan is copied asynchronously from the wrapper's own pinned memory, which its next plan overwrites. So
wrappers stand in a ring, and each is planned again only when the device has read its last plan. All use one stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toka_async.arrays import Int64
from toka_async.attention.base import AttentionBatch
from toka_async.attention.query_tiles import QueryTiles

STEPS = 3  # steps that may be planned and not begun
_COLUMNS = 7  # columns of at most rows + 1 entries in pinned memory


class PinnedInputs:
    """Pinned memory for one plan's host arrays. `put` and `upload` hand it out, `reset` takes all of it back."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.device = device
        self.memory = torch.empty(_COLUMNS * (max_rows + 1), dtype=torch.int32, pin_memory=on_gpu)
        self.read = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        self.used = 0

    def reset(self) -> None:
        """Waits until the device has read what was handed out."""
        if self.read is not None:
            self.read.synchronize()
        self.used = 0

    def seal(self) -> None:
        """Marks the place in the device's stream where everything handed out has been read."""
        if self.read is not None:
            self.read.record()

    def put(self, *columns: Int64) -> Tensor:
        """Copies int32 [columns, n] into pinned memory on the host."""
        width = len(columns[0])
        piece = self.memory[self.used : self.used + len(columns) * width].view(len(columns), width)
        self.used += len(columns) * width
        for target, column in zip(piece.numpy(), columns, strict=True):
            target[:] = column
        return piece

    def upload(self, *columns: Int64) -> Tensor:
        """Copies int32 [columns, n] to the device."""
        return self.put(*columns).to(self.device, non_blocking=True)


class WrapperRing:
    """Wrappers that `make` makes, for one plan a step, of at most `max_rows`."""

    def __init__(self, make: Callable[[], Any], max_rows: int, device: torch.device) -> None:
        self.entries = [(make(), PinnedInputs(max_rows, device)) for _ in range(STEPS)]
        self.next = 0

    def take(self) -> tuple[Any, PinnedInputs]:
        """Takes the next wrapper and its inputs, once they are free."""
        wrapper, inputs = self.entries[self.next]
        self.next = (self.next + 1) % len(self.entries)
        inputs.reset()
        return wrapper, inputs


def put_query_bounds(inputs: PinnedInputs, spans: QueryTiles) -> Tensor:
    """Puts where each span's queries begin and end, int32 [n + 1] on the host."""
    return inputs.put(_find_bounds(spans.counts))[0]


def put_paged_keys(
    inputs: PinnedInputs, batch: AttentionBatch, spans: QueryTiles, page_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Puts the pages and keys of spans, each from its first page on, in a wrapper's format.

    Returns where each span's pages begin and end, int32 [n + 1] on the host; their ids, int32 on the device; and the
    keys in each span's last page, int32 [n] on the host.
    """
    starts = _find_bounds(spans.num_pages)
    ends = spans.ends + (spans.counts - 1 if spans.causal else 0)
    last_keys = inputs.put((ends - 1) % page_size + 1)[0]
    rows, num_pages, shifts = inputs.upload(spans.rows, spans.num_pages, starts[:-1] - spans.first_pages)
    span = torch.repeat_interleave(
        num_pages, output_size=int(starts[-1])
    )  # without the size it would wait for the device
    columns = torch.arange(len(span), device=span.device) - shifts[span]
    slots = batch.slots.index_select(0, rows)
    return inputs.put(starts)[0], batch.page_table[slots[span], columns], last_keys


def _find_bounds(counts: Int64) -> Int64:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
