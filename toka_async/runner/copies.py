"""Copies columns to the device and results back, several in one copy. Nobody waits before the values are needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from toka_async.attention.copies import to_device


def upload(columns: Sequence[npt.NDArray[np.integer]], device: torch.device) -> list[Tensor]:
    """Copies integer columns of any lengths to `device`. Returns int64 tensors, views of one tensor."""
    sizes = [column.size for column in columns]
    tensor = to_device(np.concatenate(columns, dtype=np.int64, casting="safe"), device)
    return list(tensor.split_with_sizes(sizes))


class Download:
    """Copies tensors of one device, int32 or float32 of any shapes, to the host.

    On a GPU they are packed into one tensor first, so that they can be overwritten at once.
    """

    def __init__(self, tensors: Sequence[Tensor], stream: torch.cuda.Stream | None = None) -> None:
        self._shapes = [(tensor.shape, tensor.dtype) for tensor in tensors]
        self._event: torch.cuda.Event | None = None
        if not tensors:
            return
        packed = torch.cat([tensor.reshape(-1).view(torch.int32) for tensor in tensors])
        if stream is None:
            self._host = packed.cpu()
            return
        self._packed = packed  # until the copy is done
        self._host = torch.empty(packed.numel(), dtype=torch.int32, pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._host.copy_(packed, non_blocking=True)
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._event.record(stream)

    def collect(self) -> list[npt.NDArray[Any]]:
        """Waits for the values. Returns arrays of the tensors' shapes, in order."""
        if not self._shapes:
            return []
        if self._event is not None:
            self._event.synchronize()
        packed, first, arrays = self._host.numpy(), 0, []
        for shape, dtype in self._shapes:
            part = packed[first : first + shape.numel()]
            first += part.size
            arrays.append(part.view(np.float32 if dtype == torch.float32 else np.int32).reshape(shape))
        return arrays
