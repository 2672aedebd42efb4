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
    words = [tensor.reshape(-1).view(torch.int32) for tensor in tensors]
    packed = (torch.cat(words) if len(words) > 1 else words[0]).cpu().numpy()
    ends = np.cumsum([tensor.numel() for tensor in tensors])[:-1]
    dtypes = (np.float32 if tensor.dtype == torch.float32 else np.int32 for tensor in tensors)
    parts = zip(np.split(packed, ends), dtypes, tensors, strict=True)
    return [part.view(dtype).reshape(tensor.shape) for part, dtype, tensor in parts]
