"""Sums that tell whether two tensors have the same bits, and that ranks can compute of their parts.

The sum of a tensor is that over its elements of `bits * weight(index)` modulo 2^64: bits as an unsigned integer, index
in C order in the whole tensor, weight(i) = (i * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03) | 1. So the sums of parts add
up, and neither a swap of elements nor a change of one goes unnoticed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

_FACTOR, _SHIFT = 0x9E3779B97F4A7C15 - 2**64, 0xD1B54A32D192ED03 - 2**64  # as int64
_MOST = 1 << 22  # elements at once, which take 8 bytes each, a few times
_KINDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MASKS = {1: 0xFF, 2: 0xFFFF, 4: 0xFFFFFFFF, 8: -1}


def sum_part(part: Tensor, shape: Sequence[int], starts: Sequence[int]) -> int:
    """Sums a part of a tensor of that shape, which begins at these indices; unsigned."""
    if not part.dim():
        part, shape, starts = part[None], [1], [0]
    size, total = part.element_size(), 0
    num_rows = max(1, _MOST // max(1, prod(part.shape[1:])))
    for first in range(0, len(part), num_rows):
        rows = part[first : first + num_rows]
        indices = _count_indices(rows, shape, [starts[0] + first, *starts[1:]])
        bits = rows.reshape(-1).view(_KINDS[size]).to(torch.int64) & _MASKS[size]
        total += int((bits * (indices * _FACTOR + _SHIFT | 1)).sum())
    return total % 2**64


def _count_indices(part: Tensor, shape: Sequence[int], starts: Sequence[int]) -> Tensor:
    """The index in the whole tensor of each element, [elements]."""
    indices = torch.zeros((), dtype=torch.int64, device=part.device)
    for size, start, whole in zip(part.shape, starts, shape, strict=True):
        indices = indices[..., None] * whole + torch.arange(start, start + size, device=part.device)
    return indices.reshape(-1)


def sum_tensor(tensor: Tensor) -> str:
    """The sum of a whole tensor, 16 hexadecimal digits."""
    return f"{sum_part(tensor.detach(), tensor.shape, [0] * tensor.dim()):016x}"


def sum_tensors(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """What `EngineControl.checksum` answers where the engine has these tensors, in the dtype that it has."""
    return {name: sum_tensor(tensor) for name, tensor in tensors.items()}
