"""The paged KV cache: one tensor of keys and one of values a layer, `[page, kv_head, token, dim]`, in every backend.

Pages are numbers here; the scheduler knows which are in use, and by whom.
"""

from __future__ import annotations

import torch
from torch import Tensor

from toka_async.bar import Show, show_nothing
from toka_async.checkpoint.spec import ModelSpec


class KVCache:
    """Keys and values of every layer, each [num_pages, num_kv_heads, page_size, head_dim]."""

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        num_kv_heads: int,
        page_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        show: Show = show_nothing,
    ) -> None:
        self.num_pages = num_pages
        self.num_kv_heads = num_kv_heads
        self.page_size = page_size
        self.head_dim = head_dim
        shape = (num_pages, num_kv_heads, page_size, head_dim)
        # Zeros, not empty: what is masked is still multiplied, and 0 * NaN is NaN.
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for layer in range(num_layers):
            show(layer, num_layers, "layers of the cache allocated")
            self.keys.append(torch.zeros(shape, dtype=dtype, device=device))
            self.values.append(torch.zeros(shape, dtype=dtype, device=device))

    def copy_pages(self, sources: Tensor, targets: Tensor) -> None:
        """Copies whole pages in all layers. int64 [n] each; all sources are read before a target is written."""
        for tensor in (*self.keys, *self.values):
            tensor[targets] = tensor[sources]


def bytes_per_token(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Returns the bytes that one token takes over all layers."""
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * dtype.itemsize
