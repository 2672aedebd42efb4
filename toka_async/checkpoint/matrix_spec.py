"""The matrices of a model as data: their names in a checkpoint, their shapes, and what they cost.

Modules, the division among ranks, the memory that a start counts and the floor of a step's time all read these. Knows
no torch and no families.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Literal

import msgspec

from toka_async.checkpoint.quantization import BLOCK, FORMATS, Quantization


def _count_quantized(quantization: Quantization) -> Callable[[int, int, int], int]:
    return lambda n, k, _: quantization.count_bytes(n, k)


# For each weight format: the bytes of [n, k] weights with all that belongs to them, where others have `itemsize` bytes.
WEIGHT_BYTES: dict[str, Callable[[int, int, int], int]] = {
    "dense": lambda n, k, itemsize: n * k * itemsize,
    **{name: _count_quantized(each) for name, each in FORMATS.items()},
}


class Units(msgspec.Struct, frozen=True):
    """One side of a matrix: `count` units of `size` values, such as heads. Tensor ranks divide units.

    order: which value of a unit in the checkpoint is the first, the second, and so on; empty: they are in order. kinds:
    (first value, values) of each kind that a unit has, such as a head's gate and its query: on a rank all units' values
    of the first kind come first, and so on; empty: units lie one after the other.
    """

    count: int
    size: int = 1
    order: tuple[int, ...] = ()
    kinds: tuple[tuple[int, int], ...] = ()

    @property
    def total(self) -> int:
        return self.count * self.size


class MatrixSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Matrices of a checkpoint that have one input, multiplied as one matrix with their outputs side by side.

    Neighbours of one name are made of the same tensor. fused: it has their rows one after the other; otherwise each of
    them is all of it, in an order of its own.
    """

    names: tuple[str, ...]  # of each in its layer, without what follows the last point: "self_attn.q_proj"
    outputs: tuple[Units, ...]  # of each
    inputs: Units
    split: Literal["outputs", "inputs"]  # the side that tensor ranks divide
    bias: bool = False
    format: str = "dense"  # a key of WEIGHT_BYTES
    fused: bool = False

    @property
    def num_outputs(self) -> int:
        return sum(units.total for units in self.outputs)

    @property
    def num_inputs(self) -> int:
        return self.inputs.total

    @property
    def has_whole_blocks(self) -> bool:
        """Whether blocks of scales, if there are any, end where the matrices do."""
        quantization = FORMATS.get(self.format)
        if quantization is None or quantization.scaling != "block":
            return True
        # Values would change their block, or have two.
        is_split = any(units.order and BLOCK % units.size for units in self.outputs)
        is_split |= any(place % BLOCK for units in self.outputs for kind in units.kinds for place in kind)
        is_split |= not self.fused and len(set(self.names)) < len(self.names)
        return not is_split and not any(units.total % BLOCK for units in (*self.outputs, self.inputs))

    def count_bytes(self, itemsize: int) -> int:
        """Counts the bytes of the parameters. itemsize: bytes of a value that is not quantized."""
        weights = WEIGHT_BYTES[self.format](self.num_outputs, self.num_inputs, itemsize)
        return weights + self.bias * self.num_outputs * itemsize

    def count_read_bytes(self, num_tokens: int, itemsize: int) -> int:  # noqa: ARG002
        """Counts the bytes of weights that a step of so many tokens reads at least."""
        return WEIGHT_BYTES[self.format](self.num_outputs, self.num_inputs, itemsize)

    def count_flops(self, num_tokens: int) -> int:
        """Counts the operations of the product for so many tokens; a multiplication and an addition are two."""
        return 2 * num_tokens * self.num_outputs * self.num_inputs

    def list_products(self, num_tokens: int) -> tuple[int, int]:
        """Returns the number of plain products that so many tokens take, and the rows of each."""
        return 1, num_tokens


def join_alike(matrices: Iterable[MatrixSpec]) -> tuple[MatrixSpec, ...]:
    """Makes one matrix of neighbours that have the same input and format."""
    groups = groupby(matrices, lambda matrix: (matrix.inputs, matrix.split, matrix.bias, matrix.format))
    return tuple(_join(list(group)) for _, group in groups)


def _join(matrices: list[MatrixSpec]) -> MatrixSpec:
    names = tuple(name for matrix in matrices for name in matrix.names)
    outputs = tuple(units for matrix in matrices for units in matrix.outputs)
    fused = any(matrix.fused for matrix in matrices)
    return msgspec.structs.replace(matrices[0], names=names, outputs=outputs, fused=fused)
