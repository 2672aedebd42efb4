"""Rows of random lengths over a cache with random pages, and attention over them from its definition, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class PagedCase:
    """A page table with rows of `lengths` keys, whose first `num_shared` pages are the same; scattered over slots.

    Tensors are as kernels take them: keys, values [pages, kv_heads, page_size, dim], page_table int32 [slots, width],
    slots int64 [rows], contexts int32 [rows]. With `is_e4m3` keys and values are stored in E4M3, with scales.
    """

    def __init__(
        self,
        seed: int,
        lengths: Sequence[int],
        page_size: int,
        kv_heads: int,
        group: int,
        dim: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        num_shared: int = 0,
        is_e4m3: bool = False,
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.device, self.dtype = device, dtype
        self.lengths, self.page_size = list(lengths), page_size
        self.kv_heads, self.heads, self.dim = kv_heads, kv_heads * group, dim
        counts = [-(-length // page_size) for length in lengths]
        pages = torch.randperm(sum(counts) + num_shared + 1, generator=self.generator).tolist()
        self.keys = self.normal(len(pages), kv_heads, page_size, dim)
        self.values = self.normal(len(pages), kv_heads, page_size, dim)
        self.key_scale, self.value_scale = (0.375, 5.0) if is_e4m3 else (1.0, 1.0)
        if is_e4m3:
            self.keys, self.values = self.keys.to(torch.float8_e4m3fn), self.values.to(torch.float8_e4m3fn)
        shared = [pages.pop() for _ in range(num_shared)]
        rows = [shared[:count] + [pages.pop() for _ in range(count - num_shared)] for count in counts]
        table = torch.randint(len(pages), (len(rows) + 2, max(counts) + 1), generator=self.generator)
        slots = torch.randperm(len(table), generator=self.generator)[: len(rows)]
        for slot, row in zip(slots.tolist(), rows, strict=True):
            table[slot, : len(row)] = torch.tensor(row)
        self.pages = rows
        self.page_table = table.int().to(device)
        self.slots = slots.to(device)
        self.contexts = torch.tensor(self.lengths, dtype=torch.int32, device=device)

    @property
    def cache(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Keys, values, page_table and slots."""
        return self.keys, self.values, self.page_table, self.slots

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, self.dtype)

    def attend(
        self,
        query: Tensor,
        row: int,
        first: int,
        last: int,
        softmax_scale: float,
        sinks: Tensor | None = None,
        soft_cap: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """One query [heads, dim] over a row's keys first to last: output [heads, dim], base-2 log-sum-exp [heads].

        softmax_scale: without the scale of keys. sinks: [heads], further scores of keys whose values are zeros.
        soft_cap: of the other scores; 0: none.
        """
        pages = torch.tensor(self.pages[row], device=self.device)
        keys, values = (
            scale * stored.double()[pages].transpose(1, 2).flatten(0, 1)[first:last].repeat_interleave(self.group, 1)
            for stored, scale in ((self.keys, self.key_scale), (self.values, self.value_scale))
        )
        scores = torch.einsum("hd,lhd->hl", query.double(), keys) * softmax_scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None]], 1)
            values = torch.cat([values, torch.zeros_like(values[:1])])
        output = torch.einsum("hl,lhd->hd", scores.softmax(-1), values)
        return output, scores.logsumexp(-1) / torch.tensor(2.0).double().log().item()

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads
