"""The token ids behind the KV cache's entries, which penalties need, at four bytes a cached token.

Shared and copied pages share and copy their ids, so a row's history needs no state of its own. Knows pages; knows no
slots.
"""

from __future__ import annotations

import torch
from torch import Tensor


class TokenHistory:
    """The history of one cache. ids: int32 [pages, page_size] on the device."""

    def __init__(self, num_pages: int, page_size: int, device: torch.device) -> None:
        self.ids = torch.zeros(num_pages, page_size, dtype=torch.int32, device=device)

    def write(self, indices: Tensor, token_ids: Tensor) -> None:
        """Writes token ids int64 [t] at cache entries int64 [t], page * page_size + offset."""
        self.ids.view(-1).index_copy_(0, indices, token_ids.to(torch.int32))

    def copy_pages(self, sources: Tensor, targets: Tensor) -> None:
        self.ids[targets] = self.ids[sources]

    def gather(self, page_table: Tensor) -> Tensor:
        """Gathers the ids of rows whose pages are int [rows, width]: int64 [rows, width * page_size]."""
        pages = page_table.flatten().long()
        return self.ids.index_select(0, pages).view(len(page_table), -1).long()
