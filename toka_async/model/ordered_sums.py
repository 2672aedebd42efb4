"""Sums over tensor ranks in the order of ranks.

NCCL and gloo add a number in an order that depends on its place in the message, and so on the other rows of a step.
Knows no layers.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from toka_async.model.comm import Comm, T


class OrderedSums:
    """`Comm` over another one. A sum gathers the ranks' parts, which takes as many times more memory and traffic."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self.rank = comm.rank
        self.size = comm.size

    def all_reduce(self, x: Tensor) -> Tensor:
        """Adds in float32, from rank 0 on, and rounds once."""
        parts = self._comm.all_gather(x[None], 0).unbind()
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part
        return total.to(x.dtype)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        rows = len(x) // self.size
        return self.all_reduce(x)[self.rank * rows : (self.rank + 1) * rows]

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return self._comm.all_gather(x, dim)

    def all_to_all(self, parts: Tensor) -> Tensor:
        return self._comm.all_to_all(parts)

    def minimum(self, number: int) -> int:
        return self._comm.minimum(number)

    def agree(self, value: T, kind: Any) -> T:
        return self._comm.agree(value, kind)
