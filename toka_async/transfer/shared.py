"""Buckets of memory that a trainer on the same host shares: POSIX shared memory, or memory of a GPU (CUDA IPC).

This is the engine's end; a trainer fills buckets with `buckets`.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from toka_async.control import CudaBucket, CudaHandle, ShmBucket
from toka_async.transfer.errors import TransferError
from toka_async.transfer.tensors import TensorBuffer, TensorInfo

FOLDER = Path("/dev/shm")


def read_tensors(buffer: Tensor, infos: Sequence[TensorInfo], offsets: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
    """Yields views of a bucket. Raises TransferError."""
    if len(offsets) != len(infos) or any(offset < 0 for offset in offsets):
        raise TransferError(f"{len(offsets)} offsets do not fit {len(infos)} tensors")
    tensors = TensorBuffer(buffer)
    for info, offset in zip(infos, offsets, strict=True):
        yield info.name, tensors.view(info, offset)


class OpenBuckets:
    """Buckets that stay mapped until `close`: mapping one takes longer than copying from it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[str | bytes, int], Tensor] = {}

    def open(self, bucket: ShmBucket | CudaBucket) -> Tensor:
        """Returns the bytes [b] of a bucket. Raises TransferError."""
        key: tuple[str | bytes, int]
        if isinstance(bucket, ShmBucket):
            key = bucket.name, find_inode(bucket.name)
            if key not in self._buffers:
                self._buffers[key] = open_shm(bucket)
        else:
            handle = find_handle(bucket, self._device)
            key = handle.handle, handle.offset
            if key not in self._buffers:
                self._buffers[key] = open_cuda(handle, self._device)
        return self._buffers[key]

    def close(self) -> None:
        self._buffers.clear()


def open_shm(bucket: ShmBucket) -> Tensor:
    """Maps a bucket as bytes [b]; changes to them are not shared. Raises TransferError."""
    name = bucket.name.removeprefix("/")
    if not name or "/" in name or name in (".", ".."):
        raise TransferError(f"{bucket.name!r} is no name of shared memory")
    try:
        file = os.open(FOLDER / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            memory = mmap.mmap(file, 0, access=mmap.ACCESS_COPY)
        finally:
            os.close(file)
    except (OSError, ValueError) as error:
        raise TransferError(f"shared memory {name!r} cannot be read: {error}") from None
    return torch.frombuffer(memory, dtype=torch.uint8)


def find_inode(name: str) -> int:
    """Tells files apart that have had the same name; 0 for none."""
    try:
        return (FOLDER / name.removeprefix("/")).stat(follow_symlinks=False).st_ino
    except (OSError, ValueError):
        return 0


def find_handle(bucket: CudaBucket, device: torch.device) -> CudaHandle:
    """Returns the handle for this GPU. Raises TransferError."""
    if device.type != "cuda":
        raise TransferError("a bucket of CUDA needs ranks on GPUs")
    own = name_gpu(device)
    handle = next((each for each in bucket.handles if each.gpu == own), None)
    if handle is None:
        raise TransferError(f"the bucket has no handle for GPU {own}")
    return handle


def open_cuda(handle: CudaHandle, device: torch.device) -> Tensor:
    """Maps memory of this GPU as bytes [b]. Raises TransferError."""
    try:
        storage = torch.UntypedStorage._new_shared_cuda(
            device.index or 0,
            handle.handle,
            handle.size,
            handle.offset,
            handle.counter,
            handle.counter_offset,
            handle.event,
            handle.waits,
        )
    except RuntimeError as error:
        raise TransferError(f"the bucket of GPU {handle.gpu} cannot be mapped: {error}") from None
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def share_cuda(buffer: Tensor) -> CudaHandle:
    """Describes bytes [b] of a GPU for other processes; the buffer has a storage of its own."""
    _, handle, size, offset, counter, counter_offset, event, waits = buffer.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    return CudaHandle(
        gpu=name_gpu(buffer.device),
        handle=handle,
        size=size,
        offset=offset,
        counter=counter,
        counter_offset=counter_offset,
        event=event,
        waits=waits,
    )


def name_gpu(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
