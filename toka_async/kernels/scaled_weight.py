"""A weight of 8-bit floats with its scales, as kernels take it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 128  # rows and columns of the weight that share a scale


@dataclass(slots=True, frozen=True)
class ScaledWeight:
    """values: E4M3 [n, k]. scales: float32, [n] of its rows, or [n / `BLOCK`, k / `BLOCK` or more] of its blocks."""

    values: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def by_block(self) -> bool:
        return self.scales.ndim == 2


Weight = Tensor | ScaledWeight  # [n, k]


def split_weight(weight: Weight) -> tuple[Tensor, Tensor | None, int]:
    """Returns values, scales, and the scales of a row of blocks; 0: there are no blocks."""
    if isinstance(weight, ScaledWeight):
        return weight.values, weight.scales, weight.scales.stride(0) if weight.by_block else 0
    return weight, None, 0
