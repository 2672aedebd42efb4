"""The arithmetic of 8-bit floats (E4M3) with scales: values times their tile's scale are the numbers.

Plain torch, for weights at a start and as the reference of the kernels. Knows neither layers nor files.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

FP8: Final = torch.float8_e4m3fn
_LARGEST = 448.0  # of the type
_LEAST = 1e-10  # magnitude that a tile's largest number counts as, so that zeros have a scale


def quantize(numbers: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Quantizes [n, k] in tiles of rows x columns; those at the ends may be smaller.

    Returns values [n, k] in E4M3 and scales [n / rows, k / columns] in float32, both sides rounded up. A tile's largest
    magnitude becomes the largest of the type.
    """
    n, k = numbers.shape
    num_rows, num_columns = -(-n // rows), -(-k // columns)
    wide = numbers.new_zeros((num_rows * rows, num_columns * columns), dtype=torch.float32)
    wide[:n, :k] = numbers
    tiles = wide.view(num_rows, rows, num_columns, columns)
    scales = tiles.abs().amax((1, 3)).clamp_min_(_LEAST) / _LARGEST
    return (tiles / scales[:, None, :, None]).view_as(wide)[:n, :k].to(FP8), scales


def dequantize(values: Tensor, scales: Tensor, rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns the numbers [n, k] of `quantize`, which are computed in float32."""
    n, k = values.shape
    of_rows = scales.repeat_interleave(rows, 0)[:n] if rows > 1 else scales
    of_numbers = of_rows.repeat_interleave(columns, 1)[:, :k] if columns < k else of_rows[:, :1]
    return values.float().mul_(of_numbers).to(dtype)
