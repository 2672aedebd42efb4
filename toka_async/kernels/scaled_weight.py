"""Weights of 8-bit floats with their scales, and the operations of a GPU on them. Loads no Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

BLOCK = 128  # rows and columns of the weight that share a scale
Quantized = tuple[Tensor, Tensor]
"""A matrix' input: E4M3 [t, k], and scales in float32, [t, 1] of tokens or [t, k / `BLOCK`] of groups."""


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


class ScaledOps(Protocol):
    """Operations with scaled weights. by_block: how the weight that takes an input is scaled, and so the input."""

    most_few: int
    """Rows up to which inputs are not quantized as they are made, as a kernel may take them as they are."""

    def quantize(self, x: Tensor, by_block: bool) -> Quantized: ...

    def quantize_norm(
        self, x: Tensor, residual: Tensor | None, norm: tuple[Tensor, float], by_block: bool
    ) -> tuple[Quantized, Tensor]:
        """Quantizes the norm (weight, epsilon) of residual + x, and returns the sum too."""
        ...

    def quantize_gate(self, gate_up: Tensor, activation: str, by_block: bool) -> Quantized:
        """Quantizes the activation of the first half times the second half."""
        ...

    def linear(self, rows: Quantized, weight: ScaledWeight, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
        """x Wᵀ + b [t, n] of the dtype."""
        ...

    def gated_linear(self, rows: Quantized, weight: ScaledWeight, dtype: torch.dtype, activation: str) -> Tensor | None:
        """The gate of x Wᵀ [t, n / 2]; None: it should be computed separately."""
        ...

    def add(self, residual: Tensor, rows: Quantized, weight: ScaledWeight) -> tuple[Tensor | None, Tensor]:
        """Returns x Wᵀ [t, n], which is yet to be added, or None if it was added in place; and the residual."""
        ...

    def compute_few(
        self,
        finish: str,
        x: Tensor,
        weight: ScaledWeight,
        bias: Tensor | None = None,
        output: Tensor | None = None,
        norm: tuple[Tensor, float] | None = None,
    ) -> Tensor | None:
        """Computes a product with rows as they are, see `FewRowsProducts.compute`; None: it should be quantized."""
        ...
