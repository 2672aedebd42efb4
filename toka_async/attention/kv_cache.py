"""The paged KV cache: one tensor of keys and one of values a layer, `[page, kv_head, token, dim]`, in every backend.

Pages are numbers here; the scheduler knows which are in use, and by whom.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from toka_async.bar import Show, show_nothing
from toka_async.checkpoint.spec import ModelSpec
from toka_async.memory.host import discard_memory

E4M3 = torch.float8_e4m3fn


class LayerScales(NamedTuple):
    """A layer's keys and values are what is stored times these."""

    keys: float = 1.0
    values: float = 1.0


@dataclass(slots=True, frozen=True)
class CacheFormat:
    """What the cache stores, apart from the dtype that the model computes in.

    dtype: E4M3, or that of the model. scales: of every layer; empty: 1. Only E4M3 has others.
    """

    dtype: torch.dtype
    scales: tuple[LayerScales, ...] = ()


class KVCache:
    """Keys and values of every layer, each [num_pages, num_kv_heads, page_size, head_dim].

    dtype: of queries, and of keys and values before they are stored. scales: of every layer.
    """

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
        stored: CacheFormat | None = None,
    ) -> None:
        """stored: None: keys and values as they are."""
        stored = stored or CacheFormat(dtype)
        assert stored.dtype in (dtype, E4M3)
        assert stored.dtype == E4M3 or not stored.scales
        self.num_pages = num_pages
        self.num_kv_heads = num_kv_heads
        self.page_size = page_size
        self.head_dim = head_dim
        self.dtype = dtype
        self.scales = stored.scales or (LayerScales(),) * num_layers
        shape = (num_pages, num_kv_heads, page_size, head_dim)
        # Zeros, not empty: what is masked is still multiplied, and 0 * NaN is NaN.
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for layer in range(num_layers):
            show(layer, num_layers, "layers of the cache allocated")
            self.keys.append(torch.zeros(shape, dtype=stored.dtype, device=device))
            self.values.append(torch.zeros(shape, dtype=stored.dtype, device=device))
        assert len(self.scales) == num_layers
        self.device = self.keys[0].device

    def make_zero_queries(self, num_tokens: int, num_heads: int) -> Tensor:
        """Makes queries [tokens, heads, dim] with which kernels are tried."""
        return torch.zeros((num_tokens, num_heads, self.head_dim), dtype=self.dtype, device=self.device)

    def release(self) -> None:
        """Gives the memory of all pages back, and keeps their addresses, so that captured graphs stay valid."""
        for tensor in (*self.keys, *self.values):
            discard_memory(tensor)

    def restore(self) -> None:
        """Takes the memory again; all pages are zeros."""
        for tensor in (*self.keys, *self.values):
            view_numbers(tensor).zero_()

    def copy_pages(self, sources: Tensor, targets: Tensor) -> None:
        """Copies whole pages in all layers. int64 [n] each; all sources are read before a target is written."""
        for tensor in map(view_numbers, (*self.keys, *self.values)):
            tensor[targets] = tensor[sources]


def view_numbers(stored: Tensor) -> Tensor:
    """Views E4M3 as bytes: torch cannot copy it everywhere."""
    return stored.view(torch.uint8) if stored.dtype == E4M3 else stored


def bytes_per_token(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Returns the bytes that one token takes over all layers. dtype: of what is stored."""
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * dtype.itemsize
