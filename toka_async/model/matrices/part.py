"""Where the tensors of a checkpoint go.

Everything with parameters says which part of which tensor it holds, so loading, random weights, tensor parallelism and
updates in place share one description.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from toka_async.model.matrices.share import RowShare, Share

FLOATS = ("F64", "F32", "F16", "BF16")  # types of tensors in safetensors files


@dataclass(slots=True, frozen=True)
class WeightPart:
    """Where one tensor of a checkpoint goes.

    target: the rank's values, a view of a parameter; a source with fewer dimensions is repeated over it. shares: the
    rank's part of each of the tensor's dimensions, of which only the first may be in pieces. dtypes: what the tensor's
    type may be. constant: the value of random weights; None: they are normally distributed. store: stores the rank's
    values in a way of its own; None: they are copied to the target.
    """

    target: Tensor
    shares: tuple[RowShare, ...]
    dtypes: tuple[str, ...] = FLOATS
    constant: float | None = None
    store: Callable[[Tensor], None] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole tensor's."""
        return tuple(share.total for share in self.shares)

    @property
    def is_whole(self) -> bool:
        return all(share.is_whole for share in self.shares)

    def list_cells(self) -> list[tuple[slice, list[int]]]:
        """Lists the pieces: rows of the target, and the place in the whole tensor where they and its columns begin."""
        first, *others = self.shares
        columns, cells, row = [share.pieces[0].start for share in others], [], 0
        for piece in first.pieces:
            cells.append((slice(row, row + piece.size), [piece.start, *columns]))
            row += piece.size
        return cells

    def cut(self, tensor: Any) -> Tensor:
        """Cuts the rank's part out of the whole tensor, or reads it from a slice of a safetensors file."""
        first, *others = self.shares
        columns = [share.indices for share in others if isinstance(share, Share)]
        assert len(columns) == len(others)
        pieces: list[Tensor] = [tensor[(piece.indices, *columns)] for piece in first.pieces]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def write(self, values: Tensor) -> None:
        """Stores the rank's values, of any floating dtype, on any device."""
        if self.store is None:
            self.target.copy_(values)
        else:
            self.store(values)


def make_unset(*shape: int) -> nn.Parameter:
    """Makes an unset parameter of torch's default dtype on its default device."""
    return nn.Parameter(torch.empty(shape), requires_grad=False)
