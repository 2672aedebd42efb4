"""What tensor-parallel layers need of other ranks. A model also builds and runs without any process group.

Knows no layers.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, Store, TCPStore

T = TypeVar("T")
# The supervisor notices a dead rank; ranks may be minutes apart only while they load weights.
TIMEOUT = timedelta(minutes=10)
JOIN_TIMEOUT = timedelta(minutes=5)  # for ranks to find each other


class Comm(Protocol):
    """The ranks that hold one model together."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Returns the sum over ranks of `x`, in its shape; may overwrite `x`."""
        ...

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Concatenates the ranks' `x` along `dim`."""
        ...

    def all_to_all(self, parts: Tensor) -> Tensor:
        """[size, ...], a part for each rank, to [size, ...], the parts that the ranks had for this one."""
        ...

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Returns the rank's rows [t / size, ...] of the sum over ranks of `x` [t, ...]; may overwrite `x`."""
        ...

    def minimum(self, number: int) -> int: ...

    def agree(self, value: T, kind: Any) -> T:
        """Returns rank 0's value on every rank. kind: its type, which JSON can hold."""
        ...


class LocalComm:
    """A rank that is alone."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:  # noqa: ARG002
        return x

    def all_to_all(self, parts: Tensor) -> Tensor:
        return parts

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x

    def minimum(self, number: int) -> int:
        return number

    def agree(self, value: T, kind: Any) -> T:  # noqa: ARG002
        return value


class DistributedComm:
    """The ranks of a torch process group: gloo on CPUs, NCCL on GPUs."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.rank = group.rank()
        self.size = group.size()
        self.group_name: str = group.group_name
        self._group = group
        self._device = device
        # Newer versions of torch renamed these and warn about the old names.
        self._gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        self._scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
        self._can_scatter = dist.get_backend(group) == "nccl"  # gloo cannot in every version

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.numel():
            dist.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        gathered = x.new_empty(self.size, *x.shape)
        if x.numel():
            self._gather(gathered.view(-1), x.contiguous().view(-1), group=self._group)
        if dim == 0:
            return gathered.flatten(0, 1)
        return torch.cat(gathered.unbind(), dim)  # has plain strides for any number of rows

    def all_to_all(self, parts: Tensor) -> Tensor:
        assert len(parts) == self.size
        exchanged = torch.empty_like(parts)
        if parts.numel():
            dist.all_to_all_single(exchanged.view(-1), parts.contiguous().view(-1), group=self._group)
        return exchanged

    def reduce_scatter(self, x: Tensor) -> Tensor:
        rows = len(x) // self.size
        if not self._can_scatter:
            return self.all_reduce(x)[self.rank * rows : (self.rank + 1) * rows]
        own = x.new_empty(rows, *x.shape[1:])
        if x.numel():
            self._scatter(own, x.contiguous(), group=self._group)
        return own

    def minimum(self, number: int) -> int:
        least = torch.tensor([number], device=self._device)
        dist.all_reduce(least, dist.ReduceOp.MIN, self._group)
        return int(least)

    def agree(self, value: T, kind: Any) -> T:
        data = msgspec.json.encode(value)
        length = torch.tensor([len(data)], device=self._device)
        dist.broadcast(length, group=self._group, group_src=0)
        content = torch.zeros(int(length), dtype=torch.uint8, device=self._device)
        if self.rank == 0:
            content.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        dist.broadcast(content, group=self._group, group_src=0)
        agreed: T = msgspec.json.decode(content.cpu().numpy().tobytes(), type=kind)
        return agreed


def join(address: str, rank: int, size: int, device: torch.device, listen_fd: int = -1) -> Comm:
    """Joins a group of `size` ranks and waits until all are there; a rank that is alone starts nothing.

    address: where they meet, a file:// or tcp:// URL. listen_fd: rank 0's socket that listens there already, if the
    URL is of TCP. Raises RuntimeError when others do not come in time.
    """
    if size == 1:
        return LocalComm()
    on_gpu, store = device.type == "cuda", make_store(address, rank, size, listen_fd)
    store.set_timeout(JOIN_TIMEOUT)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=TIMEOUT,
        device_id=device if on_gpu else None,
    )
    store.set_timeout(TIMEOUT)  # groups exchange addresses at their first use, which may be after the weights
    assert dist.group.WORLD is not None
    return DistributedComm(dist.group.WORLD, device)


def make_store(address: str, rank: int, size: int, listen_fd: int) -> Store:
    """Makes what the ranks find each other through. Raises RuntimeError when it cannot be reached."""
    url = urlsplit(address)
    if url.scheme == "file":
        return FileStore(url.path, size)
    assert url.hostname is not None
    assert url.port is not None
    is_master = rank == 0
    fd = listen_fd if is_master and listen_fd >= 0 else None
    return TCPStore(url.hostname, url.port, size, is_master, JOIN_TIMEOUT, wait_for_workers=False, master_listen_fd=fd)
