"""Host to device and back: several columns in one copy.

Knows nothing of what a column means.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def upload(columns: Sequence[npt.NDArray[np.integer]], device: torch.device) -> list[Tensor]:
    """Integer columns of any lengths as int64 tensors on `device`, views of one."""
    sizes = [column.size for column in columns]
    tensor = torch.from_numpy(np.concatenate(columns, dtype=np.int64, casting="safe"))
    if device.type != "cpu":
        tensor = tensor.pin_memory().to(device, non_blocking=True)
    return list(torch.split(tensor, sizes))


def download(tensors: Sequence[Tensor]) -> list[npt.NDArray[Any]]:
    """Tensors of one device, int32 or float32 of any shapes, as arrays of the same shapes."""
    if not tensors:
        return []
    if len(tensors) == 1:
        return [tensors[0].cpu().numpy()]
    packed = torch.cat([tensor.reshape(-1).view(torch.int32) for tensor in tensors]).cpu().numpy()
    arrays = []
    first = 0
    for tensor in tensors:
        part = packed[first : first + tensor.numel()]
        first += part.size
        arrays.append(part.view(np.float32 if tensor.dtype == torch.float32 else np.int32).reshape(tensor.shape))
    return arrays
