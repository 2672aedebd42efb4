"""Overlaps the collectives of `SequenceSharded` with matrix products: asynchronous tensor parallelism.

GPUs read each other's memory, part by part, while they multiply the parts that are there, with torch's symmetric-memory
operations. A product with a gather or a scatter has as many parts as there are ranks. These operations would use
NVLink's multicast; it must be switched off before a process begins. Knows no layers.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from toka_async.model.activation_layout import SequenceSharded, add_bias
from toka_async.model.comm import Comm, DistributedComm
from toka_async.model.matrices.matrix import Matrix, Rows

NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
Product = Callable[[Tensor, Tensor], Tensor]


@dataclass(slots=True, frozen=True)
class OverlappedShards(SequenceSharded):
    """`SequenceSharded` with fused products, of the matrices that have plain weights.

    gather_product: [u, k] of each rank and [n, k] to [v, n]. product_scatter: [v, k] and [n, k] to the sum's [u, n].
    """

    gather_product: Product
    product_scatter: Product

    def column(self, rows: Rows, matrix: Matrix) -> Tensor:
        if matrix.plain is None:
            return SequenceSharded.column(self, rows, matrix)
        return add_bias(self.gather_product(rows.values, matrix.plain), matrix)

    def gated(self, rows: Rows, matrix: Matrix, activation: str, consumer: Matrix) -> Rows:
        if matrix.plain is None:
            return SequenceSharded.gated(self, rows, matrix, activation, consumer)
        return consumer.gate(self.column(rows, matrix), activation)

    def sum(self, rows: Rows, matrix: Matrix) -> Tensor:
        if matrix.plain is None:
            return SequenceSharded.sum(self, rows, matrix)
        return add_bias(self.product_scatter(rows.values, matrix.plain), matrix)


def build_overlapped(comm: Comm) -> OverlappedShards:
    """Builds the layout for a group whose workspace is reserved."""
    group = _group(comm)

    def gather(x: Tensor, weight: Tensor) -> Tensor:
        _, (output,) = torch.ops.symm_mem.fused_all_gather_matmul(x, [weight.t()], 0, group, return_A=False)
        product: Tensor = output
        return product

    def scatter(x: Tensor, weight: Tensor) -> Tensor:
        product: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, weight.t(), "sum", 0, group)
        return product

    return OverlappedShards(comm, gather, scatter)


def explain_obstacle(comm: Comm, device: torch.device) -> str:
    """Returns why the ranks cannot overlap; empty, on all ranks, if they can. Their GPUs have successive numbers."""
    reason = _explain_obstacle_here(comm, device)
    if comm.minimum(int(not reason)):
        return ""
    return reason or "another rank's GPU cannot"


def _explain_obstacle_here(comm: Comm, device: torch.device) -> str:
    if device.type != "cuda":
        return "it needs GPUs"
    if os.environ.get(NO_MULTICAST) != "1" or _has_multicast(device):
        return f"NVLink's multicast is not switched off ({NO_MULTICAST}=1)"
    first = device.index - comm.rank
    others = [index for index in range(first, first + comm.size) if index != device.index]
    if not all(torch.cuda.can_device_access_peer(device.index, other) for other in others):
        return "GPUs cannot read each other's memory"
    return ""


def _has_multicast(device: torch.device) -> bool:
    memory = _symmetric_memory()
    return bool(memory._SymmetricMemory.has_multicast_support(memory.DeviceType.CUDA, device.index))


def reserve(comm: Comm, num_bytes: int) -> str:
    """Reserves the memory that all ranks read: twice a rank's share of a product's largest side.

    The allocator does not own it. Returns why it cannot be had; empty, on all ranks, if it is there.
    """
    reason = ""
    try:
        _symmetric_memory().get_symm_mem_workspace(_group(comm), num_bytes)
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
    if comm.minimum(int(not reason)):
        return ""
    return reason or "another rank cannot share memory"


def release(comm: Comm) -> None:
    """Frees the reserved memory once no rank reads it."""
    torch.cuda.synchronize()
    comm.minimum(0)
    _symmetric_memory()._group_name_to_workspace_tensor.pop(_group(comm), None)


def _group(comm: Comm) -> str:
    assert isinstance(comm, DistributedComm), "a rank alone, or none of torch's"
    return comm.group_name


def _symmetric_memory() -> Any:
    """Imports torch's module, which defines the operations at its first import."""
    return importlib.import_module("torch.distributed._symmetric_memory")
