"""Where the tensors of a checkpoint go.

Everything with parameters says which part of which tensor it holds, so loading, random weights, tensor parallelism and
updates in place share one description.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from toka_async.model.matrices.share import JoinedShare, Share

FLOATS = ("F64", "F32", "F16", "BF16")  # types of tensors in safetensors files


@dataclass(slots=True, frozen=True)
class WeightPart:
    """Where one tensor of a checkpoint goes.

    target: the rank's values, a view of a parameter; a source with fewer dimensions is repeated over it. shares: the
    rank's part of each of the tensor's dimensions; of the first one there may be several runs. dtypes: what the
    tensor's type may be. constant: the value of random weights; None: they are normally distributed. store: stores the
    rank's values in a way of its own; None: they are copied to the target. restore: returns the values that were
    stored, in the model's dtype, where the target has others, or another order. kept: the shares of these, where they
    are not all. order: int64, on the CPU: which of the rank's rows each row of the target is; None: they are in order.
    """

    target: Tensor
    shares: tuple[Share | JoinedShare, ...]
    dtypes: tuple[str, ...] = FLOATS
    constant: float | None = None
    store: Callable[[Tensor], None] | None = None
    restore: Callable[[], Tensor] | None = None
    kept: tuple[Share | JoinedShare, ...] | None = None
    order: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole tensor's."""
        return tuple(share.total for share in self.shares)

    @property
    def is_whole(self) -> bool:
        return all(share.is_whole for share in self.shares)

    def cut(self, tensor: Any) -> Tensor:
        """Cuts the rank's part out of a tensor, or of a slice of a safetensors file."""
        if isinstance(tensor, Tensor) and self.is_whole:
            return tensor
        runs: list[Tensor] = [tensor[tuple(share.indices for share in run)] for run in _list_runs(self.shares)]
        return runs[0] if len(runs) == 1 else torch.cat(runs)

    def write(self, values: Tensor) -> None:
        """Stores the rank's values, of any floating dtype, on any device."""
        if self.order is not None:
            values = values.index_select(0, self.order.to(values.device))
        if self.store is None:
            self.target.copy_(values)
        else:
            self.store(values)

    def read(self) -> Iterator[tuple[tuple[Share, ...], Tensor]]:
        """Yields the rank's values as a checkpoint has them: each run of rows with its place in the tensor."""
        values = self.target if self.restore is None else self.restore()
        if values.dim() > len(self.shares):
            values = values[0]  # it is repeated
        runs = [*_list_runs(self.kept or self.shares)]
        sizes = [run[0].size for run in runs]
        if self.order is not None:
            step = len(values) // sum(sizes)  # rows that are there twice come later again
            values = values.index_select(0, self.order.argsort(stable=True)[::step].to(values.device))
        return zip(runs, torch.split(values, sizes), strict=True)


def _list_runs(shares: Iterable[Share | JoinedShare]) -> Iterator[tuple[Share, ...]]:
    """Yields the runs of the first dimension, each with the other dimensions' shares."""
    return product(*(share.runs for share in shares))


def make_unset(*shape: int) -> nn.Parameter:
    """Makes an unset parameter of torch's default dtype on its default device."""
    return nn.Parameter(torch.empty(shape), requires_grad=False)
