"""The matrices of a model as data: their names in a checkpoint, their shapes, and what they cost.

Modules, the division among ranks, the memory that a start counts and the floor of a step's time all read these. Knows
no torch and no families.
"""

from __future__ import annotations

from collections.abc import Callable
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
    """One side of a matrix: `count` units of `size` values, such as heads. Tensor ranks divide units."""

    count: int
    size: int = 1

    @property
    def total(self) -> int:
        return self.count * self.size

    def has_whole(self, block: int) -> bool:
        return self.total % block == 0


class PackedUnits(msgspec.Struct, frozen=True):
    """One side of a matrix whose units have values of several kinds, such as a head's query and its gate.

    sizes: of a unit's values of each kind, in the checkpoint's order. by_unit: each unit's values lie together there;
    otherwise those of a kind do. order: of the kinds on a rank, where those of a kind lie together; empty: the same.
    """

    count: int
    sizes: tuple[int, ...]
    by_unit: bool
    order: tuple[int, ...] = ()

    @property
    def total(self) -> int:
        return self.count * sum(self.sizes)

    def list_places(self, first: int, count: int) -> list[tuple[int, int]]:
        """Lists where the checkpoint has some of the units, as (start, values), in the order of a rank."""
        size, places = sum(self.sizes), list[tuple[int, int]]()
        for kind in self.order or range(len(self.sizes)):
            before, own = sum(self.sizes[:kind]), self.sizes[kind]
            if self.by_unit:
                places += [(unit * size + before, own) for unit in range(first, first + count)]
            else:
                places.append((self.count * before + first * own, count * own))
        return places

    def has_whole(self, block: int) -> bool:
        """Tells whether the values of each kind that lie together are whole blocks."""
        return not any((size if self.by_unit else self.count * size) % block for size in self.sizes)


class MatrixSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Matrices of a checkpoint that have one input, multiplied as one matrix with their outputs side by side."""

    names: tuple[str, ...]  # of each in its layer, without what follows the last point: "self_attn.q_proj"
    outputs: tuple[Units | PackedUnits, ...]  # of each
    inputs: Units
    split: Literal["outputs", "inputs"]  # the side that tensor ranks divide
    bias: bool = False
    format: str = "dense"  # a key of WEIGHT_BYTES

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
        return all(units.has_whole(BLOCK) for units in (*self.outputs, self.inputs))

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
