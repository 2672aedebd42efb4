"""Where the tensors of a checkpoint go.

Everything with parameters says which part of which tensor it holds, so loading, random weights, tensor parallelism and
updates in place share one description.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from toka_async.model.matrices.share import Share

FLOATS = ("F64", "F32", "F16", "BF16")  # types of tensors in safetensors files


@dataclass(slots=True, frozen=True)
class WeightPart:
    """Where one tensor of a checkpoint goes.

    target: the rank's values, a view of a parameter; a source with fewer dimensions is repeated over it. shares: the
    rank's part of each of the tensor's dimensions. dtypes: what the tensor's type may be. constant: the value of random
    weights; None: they are normally distributed. store: stores the rank's values in a way of its own; None: they are
    copied to the target. restore: returns what was stored, if it is all there in another order.
    """

    target: Tensor
    shares: tuple[Share, ...]
    dtypes: tuple[str, ...] = FLOATS
    constant: float | None = None
    store: Callable[[Tensor], None] | None = None
    restore: Callable[[], Tensor] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole tensor's."""
        return tuple(share.total for share in self.shares)

    @property
    def is_whole(self) -> bool:
        return all(share.is_whole for share in self.shares)

    @property
    def indices(self) -> tuple[slice, ...]:
        """Cuts the rank's part out of the tensor."""
        return tuple(share.indices for share in self.shares)

    def write(self, values: Tensor) -> None:
        """Stores the rank's values, of any floating dtype, on any device."""
        if self.store is None:
            self.target.copy_(values)
        else:
            self.store(values)


def make_unset(*shape: int) -> nn.Parameter:
    """Makes an unset parameter of torch's default dtype on its default device."""
    return nn.Parameter(torch.empty(shape), requires_grad=False)
