"""What is said of tensors before they come: names, dtypes and shapes; and how they lie in a buffer of bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from toka_async.transfer.errors import TransferError

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)
}
ALIGNMENT = 16  # bytes, of a tensor in a shared bucket


@dataclass(slots=True, frozen=True)
class TensorInfo:
    """A tensor that is to come."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class TensorBuffer:
    """Bytes [b] in which tensors lie. A view takes one call of torch: the host makes hundreds in a few milliseconds."""

    def __init__(self, data: Tensor) -> None:
        assert data.dtype == torch.uint8
        assert data.storage_offset() == 0
        self.num_bytes = data.numel()
        self._data = data
        self._is_aligned = data.data_ptr() % ALIGNMENT == 0
        self._typed: dict[torch.dtype, Tensor] = {}  # no values, in the same memory

    def view(self, info: TensorInfo, offset: int) -> Tensor:
        """Views the bytes from an offset on as the tensor; copies them where they do not lie as torch needs it.

        Raises TransferError.
        """
        num_bytes, size = info.num_bytes, info.dtype.itemsize
        if offset < 0 or offset + num_bytes > self.num_bytes:
            raise TransferError(f"{info.name}: {num_bytes} bytes from {offset} on are not in {self.num_bytes} bytes")
        if offset % size or not self._is_aligned:
            return self._data[offset : offset + num_bytes].clone().view(info.dtype).view(info.shape)
        typed = self._typed.get(info.dtype)
        if typed is None:
            typed = self._typed[info.dtype] = self._data[:0].view(info.dtype)
        return typed.as_strided(info.shape, list_strides(info.shape), offset // size)


def list_strides(shape: Sequence[int]) -> list[int]:
    """Lists the strides of a tensor in C order."""
    strides = [1] * len(shape)
    for place in range(len(shape) - 1, 0, -1):
        strides[place - 1] = strides[place] * shape[place]
    return strides


def read_infos(names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[TensorInfo]:
    """Reads columns of one length. Raises TransferError that names the tensor."""
    if not len(names) == len(dtypes) == len(shapes):
        raise TransferError(f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes are not as many")
    infos = []
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        known = DTYPES.get(dtype.removeprefix("torch."))
        if known is None:
            raise TransferError(f"{name}: dtype {dtype!r} is not known; known: {', '.join(DTYPES)}")
        if any(size < 0 for size in shape):
            raise TransferError(f"{name}: shape {list(shape)} has a negative size")
        infos.append(TensorInfo(name, known, tuple(shape)))
    return infos


def describe_tensor(name: str, tensor: Tensor) -> TensorInfo:
    return TensorInfo(name, tensor.dtype, tuple(tensor.shape))


def view_bytes(tensor: Tensor) -> Tensor:
    """The values of a tensor as bytes [b], in C order."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def divide_chunks(infos: Sequence[TensorInfo], buffer_bytes: int) -> Iterator[list[TensorInfo]]:
    """Divides tensors into the chunks of vLLM's packed wire: a chunk ends with the tensor that exceeds the buffer."""
    chunk: list[TensorInfo] = []
    total = 0
    for info in infos:
        chunk.append(info)
        total += info.num_bytes
        if total > buffer_bytes:
            yield chunk
            chunk, total = [], 0
    if chunk:
        yield chunk
