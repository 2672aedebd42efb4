"""The paged KV cache: one tensor of keys and one of values a layer, `[page, kv_head, token, dim]`, in every backend.

Pages are numbers here; the scheduler knows which are in use, and by whom.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from toka_async.bar import Show, show_nothing
from toka_async.checkpoint.spec import ModelSpec
from toka_async.memory.host import discard_memory
from toka_async.memory.virtual import NOT_MAPPED, MemoryStaysError, VirtualMemory, map_memory, view_memory

ALIGNMENT = 256  # bytes, of a layer's keys or values in memory that can be given back
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

    dtype: of queries, and of keys and values before they are stored. scales: of every layer. of_windows: the layers
    have a window, and the pages are window pages. is_finite: there is no NaN or infinity in any page; False on a GPU,
    where the host would have to wait to know.
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
        can_sleep: bool = False,
        of_windows: bool = False,
    ) -> None:
        """stored: None: keys and values as they are. can_sleep: a GPU's memory can be given back and taken again.

        Such memory is also taken sooner: torch takes a large cache in thousands of blocks.
        """
        stored = stored or CacheFormat(dtype)
        assert stored.dtype in (dtype, E4M3)
        assert stored.dtype == E4M3 or not stored.scales
        self.num_pages = num_pages
        self.of_windows = of_windows
        self.num_kv_heads = num_kv_heads
        self.page_size = page_size
        self.head_dim = head_dim
        self.dtype = dtype
        self.scales = stored.scales or (LayerScales(),) * num_layers
        shape = (num_pages, num_kv_heads, page_size, head_dim)
        # Zeros, not empty: what is masked is still multiplied, and 0 * NaN is NaN.
        make_zeros = partial(torch.zeros, shape, dtype=stored.dtype, device=device)
        self._memory: VirtualMemory | None = None
        if can_sleep and device.type == "cuda":
            num_bytes = -(-prod(shape) * stored.dtype.itemsize // ALIGNMENT) * ALIGNMENT
            self._memory = map_memory(2 * num_layers * num_bytes, device)
        if self._memory is not None:
            places = iter(torch.split(view_memory(self._memory, device), num_bytes))
            make_zeros = partial(_take_zeros, places, shape, stored.dtype)
        self._is_released = False
        self.is_finite = device.type == "cpu"
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for layer in range(num_layers):
            show(layer, num_layers, "layers of the cache allocated")
            self.keys.append(make_zeros())
            self.values.append(make_zeros())
        assert len(self.scales) == num_layers
        self.device = self.keys[0].device

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    @property
    def mapped_bytes(self) -> int:
        """Bytes of a GPU that torch does not count: 0 while it is released, and where torch took the memory."""
        return 0 if self._memory is None else self._memory.mapped_bytes

    def make_zero_queries(self, num_tokens: int, num_heads: int) -> Tensor:
        """Makes queries [tokens, heads, dim] with which kernels are tried."""
        return torch.zeros((num_tokens, num_heads, self.head_dim), dtype=self.dtype, device=self.device)

    def release(self) -> None:
        """Gives the memory of all pages back, and keeps their addresses, so that captured graphs stay valid.

        Raises MemoryStaysError on a GPU that maps no memory.
        """
        if self.device.type == "cuda":
            if self._memory is None:
                raise MemoryStaysError(NOT_MAPPED)
            self._memory.release()
        else:
            for tensor in (*self.keys, *self.values):
                discard_memory(tensor)
        self._is_released = True

    def restore(self) -> None:
        """Takes the memory again, if it was given back; all pages are zeros. Raises MemoryStaysError."""
        if not self._is_released:
            return
        if self._memory is not None:
            self._memory.restore()
        for tensor in (*self.keys, *self.values):
            view_numbers(tensor).zero_()
        self._is_released = False
        self.is_finite = self.device.type == "cpu"

    def copy_pages(self, sources: Tensor, targets: Tensor, windows: tuple[Tensor, Tensor] | None = None) -> None:
        """Copies whole pages in all layers. int64 [n] each; all sources are read before a target is written.

        windows: their window pages, if the model has any.
        """
        if self.of_windows and windows is not None:
            sources, targets = windows
        for tensor in map(view_numbers, (*self.keys, *self.values)):
            tensor[targets] = tensor[sources]


def _take_zeros(places: Iterator[Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Makes zeros of that shape of the next place's bytes."""
    place = next(places)
    return place.zero_()[: prod(shape) * dtype.itemsize].view(dtype).view(shape)


def view_numbers(stored: Tensor) -> Tensor:
    """Views E4M3 as bytes: torch cannot copy it everywhere."""
    return stored.view(torch.uint8) if stored.dtype == E4M3 else stored


def make_caches(
    spec: ModelSpec,
    num_pages: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    show: Show = show_nothing,
    stored: CacheFormat | None = None,
    can_sleep: bool = False,
    num_window_pages: int = 0,
) -> list[KVCache]:
    """Makes a `KVCache` for each kind of attention (`ModelSpec.attention_kinds`).

    spec: of the rank's layers. stored: with the scales of all of these, or with none. num_window_pages: of layers with
    a window; 0: as many as the others have.
    """
    caches, numbers = [], spec.cached_layers
    for kind, layers in spec.attention_kinds.items():
        own = stored
        if stored is not None and stored.scales:
            own = CacheFormat(stored.dtype, tuple(stored.scales[numbers[layer]] for layer in layers))
        count = num_window_pages if kind.window and num_window_pages else num_pages
        shape = len(layers), count, kind.num_kv_heads, page_size, kind.head_dim
        caches.append(KVCache(*shape, dtype, device, show, own, can_sleep, of_windows=kind.window > 0))
    return caches


def make_cache(
    spec: ModelSpec, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device, **options: Any
) -> KVCache:
    """Makes the one cache of a model whose layers are of one kind, see `make_caches`."""
    (cache,) = make_caches(spec, num_pages, page_size, dtype, device, **options)
    return cache


def bytes_per_token(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Returns the bytes that one token takes over all layers. dtype: of what is stored."""
    return sum(attention.cached_values for attention in spec.attentions) * dtype.itemsize
