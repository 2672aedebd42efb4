"""Copies from the host to a device, without waiting."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def pin(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Puts the values where a CUDA device can fetch them on its own time. For a CPU, returns the same memory."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def to_device(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copies the values in the device's stream; the host does not wait. On a CPU, returns the same memory."""
    return pin(values, device).to(device, non_blocking=True)
