"""What tensor-parallel layers need of other ranks. The model builds and runs without any process group.

`Share` is the one place that decides which part of a matrix a rank holds. Knows no transport and no layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Comm(Protocol):
    """The ranks that hold one model together."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks of `x`, same shape; may be written over `x`."""
        ...

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """The ranks' `x` one after the other along `dim`."""
        ...


class LocalComm:
    """One rank alone."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:  # noqa: ARG002
        return x


@dataclass(slots=True, frozen=True)
class Share:
    """A rank's contiguous part of `total` rows, columns or heads."""

    total: int
    start: int
    size: int


def share_of(total: int, comm: Comm) -> Share:
    """This rank's equal part of `total`, which the number of ranks divides."""
    assert total % comm.size == 0, f"{total} cannot be split over {comm.size} ranks"
    size = total // comm.size
    return Share(total, comm.rank * size, size)
