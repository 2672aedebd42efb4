"""Groups of torch.distributed beside those of the engine, made as SGLang's trainers make theirs.

Both ends meet at a TCP store, and call the same function of torch, so that they agree on the names in it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d

from toka_async.control import GroupTransfer
from toka_async.transfer.deadline import Deadline
from toka_async.transfer.errors import TransferError
from toka_async.transfer.store import open_store

INTERFACE = "GLOO_SOCKET_IFNAME"


class TorchGroup:
    """This process's end of a group; rank 0 is the trainer."""

    packed = False
    buffer_bytes = 0

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.device = device
        self._group: dist.ProcessGroup | None = group

    def broadcast(self, tensor: Tensor, deadline: Deadline) -> None:
        """See BroadcastGroup."""
        if self._group is None:
            raise TransferError("the group is closed")
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = deadline.left
        try:
            work = self._group.broadcast([tensor], options)
            if self.device.type == "cuda":  # the host would not wait
                deadline.wait_until(work.is_completed, "a broadcast")
                work.wait()
            else:
                work.wait(deadline.left)
        except RuntimeError as error:
            raise TransferError(f"the broadcast from the trainer failed: {first_line(error)}") from None

    def close(self) -> None:
        """See BroadcastGroup."""
        group, self._group = self._group, None
        if group is None:
            return
        if self.device.type == "cuda":
            group.abort()  # a kernel may wait for ever
        dist.destroy_process_group(group)


def join_torch_group(transfer: GroupTransfer, rank: int, device: torch.device, deadline: Deadline) -> TorchGroup:
    """Joins as `rank` of the group. device: for NCCL. Raises TransferError when the others do not come in time."""
    name = transfer.name
    helper: Any = distributed_c10d._new_process_group_helper
    try:
        store = open_store(transfer.address, transfer.port, transfer.world_size, rank, deadline)
        store.set_timeout(deadline.left)
        with _reachable(transfer.address):
            group, _ = helper(
                transfer.world_size,
                rank,
                [],
                dist.Backend(transfer.backend),
                PrefixStore(name, store),
                group_name=name,
                timeout=deadline.left,
            )
    except (RuntimeError, ValueError, TransferError) as error:
        raise TransferError(
            f"rank {rank} of {transfer.world_size} could not join {name!r} at {transfer.address}:{transfer.port}: "
            f"{first_line(error)}"
        ) from None
    distributed_c10d._world.pg_group_ranks[group] = {each: each for each in range(transfer.world_size)}
    return TorchGroup(group, device if transfer.backend == "nccl" else torch.device("cpu"))


@contextmanager
def _reachable(address: str) -> Iterator[None]:
    """Lets gloo choose the network interface, where the engine's own ranks talk over the loopback one alone."""
    own = os.environ.get(INTERFACE)
    if own == "lo" and address not in ("localhost", "::1") and not address.startswith("127."):
        del os.environ[INTERFACE]
    try:
        yield
    finally:
        if own is not None:
            os.environ[INTERFACE] = own


def first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:300]
