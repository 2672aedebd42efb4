"""The trainer's end of buckets that it shares with an engine on the same host. The engine's end is in `shared`."""

from __future__ import annotations

import mmap
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle

import torch
from torch import Tensor

from toka_async.control import CudaBucket, ShmBucket
from toka_async.transfer.errors import TransferError
from toka_async.transfer.shared import FOLDER, share_cuda
from toka_async.transfer.tensors import ALIGNMENT, TensorBuffer, TensorInfo, describe_tensor

Bucket = ShmBucket | CudaBucket
Filling = tuple[list[TensorInfo], Bucket]


class BucketWriter(ABC):
    """A bucket that is filled, described to the engine, and filled again once the engine has loaded it. Close it."""

    def __init__(self, buffer: Tensor) -> None:
        """buffer: bytes [b]."""
        self.num_bytes = buffer.numel()
        self._bytes: TensorBuffer | None = TensorBuffer(buffer)
        self._infos: list[TensorInfo] = []
        self._offsets: list[int] = []
        self._end = 0

    def add(self, name: str, tensor: Tensor) -> bool:
        """Copies a tensor into the bucket, or returns False: it fits only after `take`.

        The tensor is not needed afterwards. Raises TransferError for one that is larger than the whole bucket, and
        where the machine has no memory for it.
        """
        assert self._bytes is not None, "the bucket is closed"
        info = describe_tensor(name, tensor)
        num_bytes = info.num_bytes
        if num_bytes > self.num_bytes:
            raise TransferError(f"{name} has {num_bytes} bytes, the bucket {self.num_bytes}")
        if self._end + num_bytes > self.num_bytes:
            return False
        self._reserve(self._end + num_bytes)
        self._bytes.view(info, self._end).copy_(tensor.detach())
        self._infos.append(info)
        self._offsets.append(self._end)
        self._end += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return True

    def take(self) -> Filling:
        """Describes what was added since the last time, once it is there. The next tensors take its place."""
        filling = self.describe()
        self.wait()
        return filling

    def describe(self) -> Filling:
        """Describes as `take` does, without waiting: the tensors are in the bucket after `wait`."""
        infos, offsets = self._infos, self._offsets
        self._infos, self._offsets, self._end = [], [], 0
        return infos, self._describe(offsets)

    def wait(self) -> None:  # noqa: B027  # a host copies at once
        """Waits until all that was described is in the bucket."""

    @property
    def is_empty(self) -> bool:
        return not self._infos

    def fill(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Filling]:
        """Fills the bucket as often as it takes. A filling has to be loaded before the next one is asked for."""
        for filling, _ in fill_in_turn([self], tensors):
            self.wait()
            yield filling

    def close(self) -> None:
        self._bytes = None

    def _reserve(self, num_bytes: int) -> None:  # noqa: B027  # a GPU's buckets have their memory
        """Makes sure that the first bytes of the bucket can be written. Raises TransferError."""

    @abstractmethod
    def _describe(self, offsets: Sequence[int]) -> Bucket: ...


class ShmWriter(BucketWriter):
    """A bucket of POSIX shared memory. Close it, or it stays."""

    def __init__(self, name: str, num_bytes: int) -> None:
        self.name = name
        self._file = os.open(FOLDER / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._file, num_bytes)
        self._num_reserved = 0
        super().__init__(torch.frombuffer(mmap.mmap(self._file, num_bytes), dtype=torch.uint8))

    def close(self) -> None:
        super().close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            (FOLDER / self.name).unlink(missing_ok=True)

    def _reserve(self, num_bytes: int) -> None:
        """A write where the folder has no room would kill this process with SIGBUS: a container may have just 64 MB."""
        if num_bytes <= self._num_reserved:
            return
        try:
            os.posix_fallocate(self._file, self._num_reserved, num_bytes - self._num_reserved)
        except OSError as error:
            free = shutil.disk_usage(FOLDER).free >> 20
            raise TransferError(
                f"{FOLDER} has no room for a bucket: {error.strerror}, {free} MiB are free; give it more, such as with "
                "docker run --shm-size, or give smaller buckets"
            ) from None
        self._num_reserved = num_bytes

    def _describe(self, offsets: Sequence[int]) -> ShmBucket:
        return ShmBucket(name=self.name, offsets=tuple(offsets))


class CudaWriter(BucketWriter):
    """A bucket in the memory of a GPU that ranks of the engine use too. It holds tensors of this GPU."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        super().__init__(buffer)
        self._handle = share_cuda(buffer)
        self._device = device
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self._copied.synchronize()

    def _describe(self, offsets: Sequence[int]) -> CudaBucket:
        self._copied.record(torch.cuda.current_stream(self._device))
        return CudaBucket(handles=(self._handle,), offsets=tuple(offsets))


def fill_in_turn(
    writers: Sequence[BucketWriter], tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[Filling, BucketWriter]]:
    """Fills buckets in turn, as often as it takes. Yields each filling with its writer, whose `wait` it needs.

    A bucket's filling has to be loaded before the next filling but `len(writers) - 1` is asked for. Raises
    TransferError for a tensor that is larger than a bucket.
    """
    turns = cycle(writers)
    writer = next(turns)
    for name, tensor in tensors:
        if not writer.add(name, tensor):
            yield writer.describe(), writer
            writer = next(turns)
            writer.add(name, tensor)
    if not writer.is_empty:
        yield writer.describe(), writer
