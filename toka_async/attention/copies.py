"""From the host to a device, without waiting."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def pin(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """The values where a CUDA device can fetch them on its own time; for a CPU, the same memory."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def to_device(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """The values on the device, in the stream's order; the host does not wait. On a CPU, the same memory."""
    return pin(values, device).to(device, non_blocking=True)
