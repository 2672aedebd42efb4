"""Copies columns to the device and results back, several in one copy. Nobody waits before the values are needed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
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

    A GPU copies in its stream's order, so that they can be overwritten at once. Tensors that lie in one memory are
    copied as they lie there; others are packed into one tensor first.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._shapes = [(tensor.shape, tensor.dtype) for tensor in tensors]
        self._event: torch.cuda.Event | None = None
        if not tensors:
            return
        packed, self._firsts = _find_memory(tensors)
        if not packed.is_cuda:
            self._host = packed.clone()
            return
        self._host = torch.empty(packed.numel(), dtype=torch.int32, pin_memory=True)
        self._host.copy_(packed, non_blocking=True)
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record()

    def collect(self) -> list[npt.NDArray[Any]]:
        """Waits for the values. Returns arrays of the tensors' shapes, in order."""
        if not self._shapes:
            return []
        if self._event is not None:
            self._event.synchronize()
        packed, arrays = self._host.numpy(), []
        for first, (shape, dtype) in zip(self._firsts, self._shapes, strict=True):
            part = packed[first : first + shape.numel()]
            arrays.append(part.view(np.float32 if dtype == torch.float32 else np.int32).reshape(shape))
        return arrays


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Copies the values' 32 bits, tensor after tensor, into one int32 tensor."""
    return torch.cat([tensor.reshape(-1).view(torch.int32) for tensor in tensors])


def _find_memory(tensors: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """Returns one int32 tensor with the bits of all values, and where in it those of each tensor begin."""
    sizes = [tensor.numel() for tensor in tensors]
    memory = tensors[0].untyped_storage().data_ptr()
    if all(tensor.is_contiguous() and tensor.untyped_storage().data_ptr() == memory for tensor in tensors):
        places = [int(tensor.storage_offset()) for tensor in tensors]
        begin, end = min(places), max(place + size for place, size in zip(places, sizes, strict=True))
        whole = tensors[0].view(torch.int32).as_strided((end - begin,), (1,), begin)
        return whole, [place - begin for place in places]
    return pack(tensors), [0, *accumulate(sizes[:-1])]
