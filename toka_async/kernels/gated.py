"""The product with a gate's and an up matrix and their gated activation in one kernel, where that is the fastest.

Gate and up values never leave the chip's registers: of a step's activations the largest are neither written nor read
again, and need no memory. On an H200 at 16,384 tokens of an 8B model the kernel takes 1.5 % longer than cuBLASLt's
product alone, and the activation after that one 5 %. Knows matrices by their shapes only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler.errors import CompileTimeAssertionFailure
from triton.runtime.errors import OutOfResources, PTXASError
from triton.tools.tensor_descriptor import TensorDescriptor

from toka_async.kernels.activation import activate
from toka_async.kernels.trial import SUSTAINED, ByRows, Clock, Way, fastest, rows_to_time

logger = logging.getLogger(__name__)

_ALIGNMENT = 16  # bytes, of addresses and rows: what tensor copies need
_ROW_TILES = 16  # that share weights in the L2 cache
_LONGER = 200.0  # milliseconds of a turn at the most rows


@dataclass(slots=True, frozen=True)
class Tile:
    """Of the output, one program's: rows x columns, `depth` inputs at a time."""

    rows: int
    columns: int
    depth: int
    num_stages: int
    num_warps: int


TILES = (Tile(128, 128, 64, 3, 8), Tile(64, 128, 64, 4, 4))
_CANNOT_BE_BUILT = (OutOfResources, PTXASError, CompileTimeAssertionFailure)


@dataclass(slots=True, frozen=True)
class _Shape:
    inner: int
    hidden: int
    dtype: torch.dtype
    activation: str


class GatedProducts:
    """Gated products by our kernel for shapes and numbers of rows for which it was found to be the fastest.

    Needs a GPU that copies tensors by itself (compute capability 9.0), and 16-bit values.
    """

    def __init__(self, clock: Clock, num_programs: int, tiles: Sequence[Tile] = TILES, fewest: int = 64) -> None:
        """num_programs: that run at once, one a multiprocessor. fewest: rows; of less, only reading weights counts."""
        self._clock = clock
        self._fewest = fewest
        self._num_programs = num_programs
        self._tiles = tiles
        self._tuned: dict[_Shape, ByRows[Tile | None]] = {}  # None: separately

    def tune(
        self,
        weights: Sequence[Tensor],
        activation: str,
        sizes: Sequence[int],
        separately: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        """Choose between tiles and what computes `separately` from x and a weight, for up to each of `sizes` rows.

        weights: [2 * inner, hidden] each, of several layers, which are used in turn. The most rows are timed until the
        chip has slowed down as far as each way makes it: our kernel draws less power, and may be the faster one only
        then. If it computes the most rows, it computes all above a third of them. Allocates inputs and outputs of the
        most rows.
        """
        shape = _shape(weights[0], activation)
        if max(sizes) < self._fewest:
            return
        most, device = max(sizes), weights[0].device
        x = torch.randn(most, shape.hidden, device=device, dtype=shape.dtype)
        output = torch.empty(most, shape.inner, device=device, dtype=shape.dtype)
        if not _can_copy(x, weights[0], output):
            return

        def usual(x: Tensor, weight: Tensor, output: Tensor) -> None:
            del output
            separately(x, weight)

        tiles: list[Tile | None] = [None]
        ways: list[Way] = [usual]
        for tile in self._tiles:
            way = partial(self._run, activation, tile)
            if _is_built(tile, partial(way, x[:1], weights[0], output[:1])):
                tiles.append(tile)
                ways.append(way)
        tuned, before = ByRows[Tile | None](sorted(sizes), []), 0
        for size in tuned.sizes:
            operands = [(x[:n], output[:n]) for n in rows_to_time(size, before)]
            turn = _LONGER if size == most else SUSTAINED
            # Alike in time, ours needs less memory.
            index = fastest(ways, weights, operands, self._clock, gain=1.0, sustained=turn)
            tuned.choices.append(tiles[index])
            before = size
        _keep_largest(tuned)
        self._tuned[shape] = tuned

    def chosen(self, weight: Tensor, activation: str) -> list[Tile | None] | None:
        """What `tune` has chosen for each of its sizes, in ascending order; None: there was nothing to choose."""
        tuned = self._tuned.get(_shape(weight, activation))
        return None if tuned is None else tuned.choices

    def adopt(self, weight: Tensor, activation: str, sizes: Sequence[int], chosen: Sequence[Tile | None]) -> bool:
        """Take what was chosen before in place of tuning; False, with nothing changed: not all of it computes here."""
        shape, tiles = _shape(weight, activation), {tile for tile in chosen if tile is not None}
        x = torch.randn(1, shape.hidden, device=weight.device, dtype=shape.dtype)
        output = x.new_empty(1, shape.inner)
        if len(chosen) != len(sizes) or not tiles <= set(self._tiles) or not _can_copy(x, weight, output):
            return False
        if not all(_is_built(tile, partial(self._run, activation, tile, x, weight, output)) for tile in tiles):
            return False
        tuned = ByRows[Tile | None](sorted(sizes), list(chosen))
        _keep_largest(tuned)
        self._tuned[shape] = tuned
        return True

    def compute(self, x: Tensor, weight: Tensor, activation: str) -> Tensor | None:
        """[t, hidden] and [2 * inner, hidden] to [t, inner]; None: it should be computed separately."""
        shape = _shape(weight, activation)
        tuned = self._tuned.get(shape)
        tile = None if tuned is None or len(x) < self._fewest else tuned.of(len(x))
        if tile is None or not _can_copy(x, weight):
            return None
        output = torch.empty(len(x), shape.inner, dtype=x.dtype, device=x.device)
        self._run(activation, tile, x, weight, output)
        return output

    def ranges(self) -> list[tuple[int, int]]:
        """The numbers of rows that our kernel computes, of all shapes: from one to another, both included."""
        found: list[tuple[int, int]] = []
        for tuned in self._tuned.values():
            first = self._fewest
            for size, tile in zip(tuned.sizes, tuned.choices, strict=True):
                if tile is not None and size >= first:
                    joins = bool(found) and found[-1][1] == first - 1
                    found[-1:] = [(found[-1][0], size)] if joins else [*found[-1:], (first, size)]
                first = max(first, size + 1)
        return found

    def _run(self, activation: str, tile: Tile, x: Tensor, weight: Tensor, output: Tensor) -> None:
        num_rows, inner = output.shape
        num_tiles = triton.cdiv(num_rows, tile.rows) * triton.cdiv(inner, tile.columns)
        _gated_product[(min(self._num_programs, num_tiles),)](
            TensorDescriptor.from_tensor(x, [tile.rows, tile.depth]),
            TensorDescriptor.from_tensor(weight.view(2, inner, -1), [2, tile.columns, tile.depth]),
            TensorDescriptor.from_tensor(output, [tile.rows, tile.columns]),
            num_rows,
            inner=inner,
            hidden=x.shape[1],
            activation=activation,
            rows=tile.rows,
            columns=tile.columns,
            depth=tile.depth,
            group=_ROW_TILES,
            stages=tile.num_stages,
            num_warps=tile.num_warps,
        )


def _shape(weight: Tensor, activation: str) -> _Shape:
    outputs, hidden = weight.shape
    return _Shape(outputs // 2, hidden, weight.dtype, activation)


def _keep_largest(tuned: ByRows[Tile | None]) -> None:
    """The largest step must stay the one that needs the most memory, which is what the cache is sized by."""
    if tuned.choices[-1] is None:
        return
    for index, size in enumerate(tuned.sizes):
        if 3 * size > tuned.sizes[-1]:
            tuned.choices[index] = tuned.choices[index] or tuned.choices[-1]


def _is_built(tile: Tile, launch: Callable[[], None]) -> bool:
    """Whether the kernel that it launches can be built here, with the shared memory that its tile needs."""
    try:
        launch()
    except _CANNOT_BE_BUILT as error:
        reason = str(error).partition("\n")[0]
        logger.info("gated products: tiles of %d x %d are not used here: %s", tile.rows, tile.columns, reason)
        return False
    return True


def _can_copy(*operands: Tensor) -> bool:
    return all(
        x.is_contiguous() and x.data_ptr() % _ALIGNMENT == 0 and x.shape[1] * x.itemsize % _ALIGNMENT == 0
        for x in operands
    )


@triton.jit(do_not_specialize=["num_rows"])
def _gated_product(
    x,
    weight,
    output,
    num_rows,
    inner: tl.constexpr,
    hidden: tl.constexpr,
    activation: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
    group: tl.constexpr,
    stages: tl.constexpr,
):
    """One program: every so-manieth tile of the output.

    Descriptors of x [t, hidden], of the weight [2, inner, hidden], of which one copy brings a tile of both matrices,
    and of the output [t, inner]. What lies beyond them is read as zeros and not written.
    """
    row_tiles = tl.cdiv(num_rows, rows)
    column_tiles: tl.constexpr = (inner + columns - 1) // columns
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=True):
        # Tiles that are computed at the same time share rows and columns.
        first = tile // (group * column_tiles) * group
        height = min(row_tiles - first, group)
        row = (first + tile % (group * column_tiles) % height) * rows
        column = tile % (group * column_tiles) // height * columns
        both = tl.zeros((rows, 2 * columns), tl.float32)
        for begin in tl.range(0, hidden, depth, num_stages=stages):
            part = x.load([row, begin])
            matrices = weight.load([0, column, begin]).reshape(2 * columns, depth)
            both = tl.dot(part, matrices.T, both)
        gate, up = both.reshape(rows, 2, columns).permute(0, 2, 1).split()
        output.store([row, column], activate(gate, up, activation).to(output.dtype))
