"""The rows of a rank on its device: what a decoding step reads and writes. Only small uploads change them.

They hold the rows' next tokens, positions and pages: a decoding step needs nothing from the host. Knows no prompts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from toka_async.arrays import Int32
from toka_async.attention.base import WindowPages
from toka_async.runner.copies import upload


@dataclass(slots=True, frozen=True)
class DecodeInputs:
    """The inputs of n decoding rows, one token each: [n] int64, but contexts int32."""

    slots: Tensor
    token_ids: Tensor
    positions: Tensor
    write_indices: Tensor
    contexts: Tensor


class DeviceRows:
    """Tables over `max_seqs` slots and one more, `padding`, for rows that only fill up a batch.

    page_table: int32 [max_seqs + 1, width]; entries past a slot's pages are any pages; those of the padding slot are
    `scratch_page`, which no row owns. last_tokens, positions: int64 [max_seqs + 1]: the next token of a decoding slot,
    and how many of its tokens have keys and values in the cache. order: int64, the decoding slots, then padding. For a
    step in parts, `whole_order` holds all decoding slots, and `order` those of the part that is computed.

    Of models with window pages: window_table is the page table of layers with a window; entries of pages that a row
    does not see through it are any window pages. beside: int32 [scratch_page + 1], each page's window page.

    Args:
        width: pages for which a row has room; on a CPU the table grows when a row needs more.
    """

    def __init__(
        self,
        max_seqs: int,
        page_size: int,
        width: int,
        scratch_page: int,
        device: torch.device,
        num_window_pages: int = 0,
    ) -> None:
        self.padding = max_seqs
        self.page_size = page_size
        self.device = device
        self.scratch_page = scratch_page
        self.page_table = torch.zeros(max_seqs + 1, width, dtype=torch.int32, device=device)
        self.page_table[self.padding] = scratch_page
        self.beside: Tensor | None = None
        self.window_table = self.page_table
        if num_window_pages:
            # Steps that no scheduler made do not say where window pages are: then they are anywhere.
            pages = torch.arange(scratch_page + 1, dtype=torch.int32, device=device)
            self.beside = pages % num_window_pages
            self.beside[scratch_page] = num_window_pages
            self.window_table = torch.zeros_like(self.page_table)
            self.window_table[self.padding] = num_window_pages
        self.last_tokens = torch.zeros(max_seqs + 1, dtype=torch.int64, device=device)
        self.positions = torch.zeros(max_seqs + 1, dtype=torch.int64, device=device)
        self.order = torch.full((max_seqs,), self.padding, dtype=torch.int64, device=device)
        self.whole_order = self.order

    def widen(self, width: int) -> None:
        """Makes room for `width` pages in every row. Grows by doubling, on a CPU: on a GPU, graphs hold the table."""
        old = self.page_table
        if width <= old.shape[1]:
            return
        assert self.device.type == "cpu", f"a row has {width} pages where the table holds {old.shape[1]}"
        self.page_table = _widen(old, width)
        if self.beside is not None:
            self.window_table = _widen(self.window_table, width)

    def set_pages(self, cells: Tensor, pages: Tensor) -> None:
        """Sets cells of the flat page table, int64 [n] each."""
        self.page_table.view(-1).index_copy_(0, cells, pages.to(torch.int32))
        if self.beside is not None:
            self.window_table.view(-1).index_copy_(0, cells, self.beside.index_select(0, pages))

    def set_windows(self, changed: Int32) -> None:
        """Sets the window pages of pages: [n, 2]. Tables have them once the pages are set, or renewed."""
        assert self.beside is not None
        pages, windows = upload((changed[:, 0], changed[:, 1]), self.device)
        self.beside.index_copy_(0, pages, windows.to(torch.int32))

    def renew_windows(self, first: int, end: int) -> None:
        """Renews the table's window pages at places in all rows: who shares a page has the same window page."""
        assert self.beside is not None
        self.widen(end)
        pages = self.page_table[:, first:end]
        self.window_table[:, first:end] = self.beside.index_select(0, pages.reshape(-1)).view_as(pages)

    def find_windows(self, pages: Tensor) -> Tensor:
        """Finds where layers with a window keep pages, int64 [n] each."""
        return pages if self.beside is None else self.beside.index_select(0, pages).long()

    def describe_windows(self, write_indices: Tensor) -> WindowPages | None:
        """Describes where layers with a window read, and write what others write at `write_indices`."""
        if self.beside is None:
            return None
        pages = torch.div(write_indices, self.page_size, rounding_mode="floor")
        windows = self.beside.index_select(0, pages).long()
        return WindowPages(self.window_table, torch.add(write_indices, windows - pages, alpha=self.page_size))

    def set_order(self, order: Int32, num_padded: int) -> None:
        """Sets the decoding slots, in row order, and padding up to `num_padded` rows."""
        padded = np.full(max(num_padded, order.size), self.padding, dtype=np.int64)
        padded[: order.size] = order
        (uploaded,) = upload((padded,), self.device)
        self.order[: padded.size].copy_(uploaded)

    def keep_order(self, order: Int32) -> None:
        """Sets the decoding slots of a step in parts, in row order; `take_order` chooses among them."""
        if self.whole_order is self.order:
            self.whole_order = torch.empty_like(self.order)
        if order.size:
            (uploaded,) = upload((order,), self.device)
            self.whole_order[: order.size].copy_(uploaded)

    def take_order(self, first: int, num_rows: int, num_padded: int) -> None:
        """Chooses what to decode next: rows from `first` on, and padding up to `num_padded` rows."""
        self.order[:num_rows].copy_(self.whole_order[first : first + num_rows])
        if num_padded > num_rows:
            self.order[num_rows:num_padded].fill_(self.padding)

    def decode_inputs(self, num_rows: int) -> DecodeInputs:
        """Computes the inputs of the first rows in order, on the device, from tables that stay where they are."""
        slots = self.order[:num_rows]
        positions = self.positions.index_select(0, slots)
        return DecodeInputs(
            slots=slots,
            token_ids=self.last_tokens.index_select(0, slots),
            positions=positions,
            write_indices=self.locate(slots, positions),
            contexts=(positions + 1).to(torch.int32),
        )

    def locate(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Locates tokens at `positions` of `slots` in the cache, page * page_size + offset: int64 [n] each."""
        places = torch.div(positions, self.page_size, rounding_mode="floor")
        cells = torch.add(places, slots, alpha=self.page_table.shape[1])
        pages = self.page_table.view(-1).index_select(0, cells).long()
        return torch.add(positions, pages - places, alpha=self.page_size)

    def advance(self, slots: Tensor, contexts: Tensor) -> None:
        """Records that the slots' tokens up to `contexts` [n] are computed. Padding stays where it is."""
        self.positions.index_copy_(0, slots, contexts.long())
        self.positions[self.padding :].zero_()

    def set_sampled(self, slots: Tensor, token_ids: Tensor) -> None:
        """Sets the slots' next tokens. int64 [n] each."""
        self.last_tokens.index_copy_(0, slots, token_ids)


def _widen(old: Tensor, width: int) -> Tensor:
    """Makes a page table of at least `width` pages; the last row has one page everywhere."""
    table = old.new_zeros(old.shape[0], 1 << (width - 1).bit_length())
    table[:, : old.shape[1]] = old
    table[-1] = old[-1, 0]
    return table
