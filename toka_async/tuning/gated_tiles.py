"""Chooses tiles for gated products in one kernel, by numbers of rows, where that kernel is the fastest."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from toka_async.kernels.built import explain_unbuilt
from toka_async.kernels.gated import GatedProducts, Tile, can_copy
from toka_async.kernels.scaled_weight import Weight
from toka_async.tuning.algorithms import Operands, describe_weights
from toka_async.tuning.store import Facts
from toka_async.tuning.trial import SUSTAINED, CallClock, Way, find_fastest, pick_rows_to_time, time_products

logger = logging.getLogger(__name__)

TILES = (Tile(128, 128, 64, 3, 8), Tile(64, 128, 64, 4, 4))
LONGER = 200.0  # milliseconds of a turn at the most rows
_SIZES = (128, 256, 512, 1024, 2048, 4096)


class GatedTileChoice:
    """The `Choice` of a tile for up to each of `sizes` rows; None: `separately` computes from x and a weight.

    weights: [2 * inner, hidden] each, of several layers, used in turn. library: version of the cuBLASLt that computes
    separate products. Measuring allocates inputs and outputs of the most rows.
    """

    name = "gated-product"
    kind = list[Tile | None]

    def __init__(
        self,
        gates: GatedProducts,
        weights: Sequence[Weight],
        activation: str,
        sizes: Sequence[int],
        separately: Callable[[Any, Any], object],
        library: int | None = None,
        tiles: Sequence[Tile] = TILES,
        clock: CallClock = time_products,
    ) -> None:
        self._gates = gates
        self._weights = weights
        self._activation = activation
        self._sizes = sorted(sizes)
        self._separately = separately
        self._library = library
        self._tiles = tiles
        self._clock = clock

    @property
    def is_open(self) -> bool:
        """Whether the kernel can compute any size: there are enough rows, of values that the chip can copy."""
        x = torch.empty(1, self._weights[0].shape[1], device=self._weights[0].device, dtype=self._weights[0].dtype)
        return self._sizes[-1] >= self._gates.fewest and can_copy(x, self._make_operands(1)[1], self._weights[0])

    def describe(self) -> Facts:
        return {
            **describe_weights(self._weights, self._sizes),
            "activation": self._activation,
            "library": self._library,
        }

    def admits(self, answer: Sequence[Tile | None]) -> bool:
        """Tells whether all tiles of the answer can be built here."""
        tiles = {tile for tile in answer if tile is not None}
        return len(answer) == len(self._sizes) and tiles <= set(self._tiles) and all(map(self._is_built, tiles))

    def measure(self) -> list[Tile | None]:
        """Measures the fastest way for each size.

        The most rows are timed until the chip has slowed down as far as each way makes it: our kernel draws less power,
        so it may win only then.
        """
        tiles: list[Tile | None] = [None]
        ways: list[Way] = [self._compute_separately]
        for tile in self._tiles:
            if self._is_built(tile):
                tiles.append(tile)
                ways.append(partial(self._run, tile))
        chosen = []
        for size, before in zip(self._sizes, [0, *self._sizes], strict=False):
            operands = [self._make_operands(n) for n in pick_rows_to_time(size, before)]
            turn = LONGER if size == self._sizes[-1] else SUSTAINED
            # At equal times ours wins: it needs less memory.
            index = find_fastest(ways, self._weights, operands, self._clock, gain=1.0, sustained=turn)
            chosen.append(tiles[index])
        return chosen

    def use(self, answer: Sequence[Tile | None]) -> None:
        """Makes gated products of this shape use the answer from now on.

        If our kernel computes the most rows, it computes all above a third of them: the cache is sized by the largest
        step, so that step must need the most memory.
        """
        largest, most = answer[-1], self._sizes[-1]
        tiles = [tile or largest if 3 * size > most else tile for size, tile in zip(self._sizes, answer, strict=True)]
        self._gates.use(self._weights[0], self._activation, self._sizes, tiles)
        ranges = ", ".join(f"{first} to {last}" for first, last in self._gates.ranges())
        logger.info("gated products: in one kernel for %s rows", ranges or "no")

    def list_builds(self) -> list[Callable[[], None]]:
        x, output = self._make_operands(1)
        return [partial(self._run, tile, x, self._weights[0], output) for tile in self._tiles]

    def _run(self, tile: Tile, x: Any, weight: Any, output: Tensor) -> None:
        self._gates.run(self._activation, tile, x, weight, output)

    def _compute_separately(self, x: Any, weight: Any, output: Tensor) -> None:
        del output
        self._separately(x, weight)

    def _is_built(self, tile: Tile) -> bool:
        """Builds the kernel. Returns False if that fails, such as for want of shared memory."""
        x, output = self._make_operands(1)
        reason = explain_unbuilt(partial(self._run, tile, x, self._weights[0], output))
        if reason:
            logger.info("gated products: tiles of %d x %d are not used here: %s", tile.rows, tile.columns, reason)
        return not reason

    def _make_operands(self, num_rows: int) -> Operands:
        """Makes x [t, hidden] and output [t, inner]."""
        outputs, hidden = (weight := self._weights[0]).shape
        x = torch.randn(num_rows, hidden, device=weight.device, dtype=weight.dtype)
        return x, torch.empty(num_rows, outputs // 2, device=weight.device, dtype=weight.dtype)


def list_gated_sizes(most: int) -> list[int]:
    """Lists the rows to choose for. Larger sizes are more alike, and take long to measure."""
    return [*(size for size in _SIZES if size < most), most]
