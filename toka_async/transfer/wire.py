"""Tensors over a broadcast from rank 0: one by one, or packed in chunks as vLLM's trainers send them.

A group only knows how to broadcast a tensor. Both ends cut the same announced tensors in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from toka_async.transfer.deadline import Deadline
from toka_async.transfer.tensors import TensorBuffer, TensorInfo, describe_tensor, divide_chunks, view_bytes


class BroadcastGroup(Protocol):
    """An end of a group. device: of the tensors that it broadcasts. packed, buffer_bytes: see NcclTransfer."""

    @property
    def device(self) -> torch.device: ...

    @property
    def packed(self) -> bool: ...

    @property
    def buffer_bytes(self) -> int: ...

    def broadcast(self, tensor: Tensor, deadline: Deadline) -> None:
        """Fills the tensor with rank 0's; there, sends it. Returns when that is done. Raises TransferError."""
        ...

    def close(self) -> None:
        """Leaves at once, whatever is under way."""
        ...


def receive_tensors(
    group: BroadcastGroup, infos: Sequence[TensorInfo], deadline: Deadline, buffer_bytes: int = -1
) -> Iterator[tuple[str, Tensor]]:
    """Yields each tensor as it comes; it is good until the next one is asked for. Raises TransferError.

    buffer_bytes: see Broadcast.
    """
    if buffer_bytes < 0:
        buffer_bytes = group.buffer_bytes if group.packed else 0
    if not buffer_bytes:
        for info in infos:
            tensor = torch.empty(info.shape, dtype=info.dtype, device=group.device)
            group.broadcast(tensor, deadline)
            yield info.name, tensor
        return
    buffer = torch.empty(0, dtype=torch.uint8, device=group.device)
    tensors = TensorBuffer(buffer)
    for chunk in divide_chunks(infos, buffer_bytes):
        total = sum(info.num_bytes for info in chunk)
        if len(buffer) < total:
            del buffer, tensors
            buffer = torch.empty(total, dtype=torch.uint8, device=group.device)
            tensors = TensorBuffer(buffer)
        group.broadcast(buffer[:total], deadline)
        offset = 0
        for info in chunk:
            yield info.name, tensors.view(info, offset)
            offset += info.num_bytes


def send_tensors(group: BroadcastGroup, tensors: Iterable[tuple[str, Tensor]], deadline: Deadline) -> None:
    """The trainer's end, for tensors that were announced in this order. Raises TransferError."""
    if not group.packed:
        for _, tensor in tensors:
            group.broadcast(tensor.detach().to(group.device).contiguous(), deadline)
        return
    named = dict(tensors)
    for chunk in divide_chunks([describe_tensor(*each) for each in named.items()], group.buffer_bytes):
        parts = [view_bytes(named[info.name].to(group.device)) for info in chunk]
        group.broadcast(torch.cat(parts), deadline)
