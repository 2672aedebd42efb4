"""Chooses tiles for products of few rows, by numbers of rows, where our kernel is faster than the usual way."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from toka_async.kernels.built import explain_unbuilt
from toka_async.kernels.few_rows import ADD, STORE, FewRowsProducts, FewRowsTile, Norm
from toka_async.kernels.launches.pdl import FEW_ROWS
from toka_async.kernels.scaled_weight import Weight
from toka_async.tuning.algorithms import describe_weights
from toka_async.tuning.store import Facts
from toka_async.tuning.trial import CallClock, Way, find_fastest, time_products

logger = logging.getLogger(__name__)

# Each is built for every matrix at a first start.
TILES = (
    FewRowsTile(rows=1, columns=4, depth=1024, num_stages=4, num_warps=4),
    FewRowsTile(rows=1, columns=4, depth=2048, num_stages=2, num_warps=4),
    FewRowsTile(rows=1, columns=8, depth=1024, num_stages=2, num_warps=4),
    FewRowsTile(rows=1, columns=8, depth=1024, num_stages=4, num_warps=4),
    FewRowsTile(rows=16, columns=16, depth=512, num_stages=4, num_warps=2),
    FewRowsTile(rows=16, columns=32, depth=128, num_stages=4, num_warps=2),
)
_SIZES = (1, 2, 4, 8, FEW_ROWS)


class FewRowsChoice:
    """The `Choice` of a tile for up to each of `sizes` rows; None: the usual way.

    weights: of one shape and use, of several layers, used in turn. finish: see `FINISHES`. usual: computes from x and a
    weight, adding to the output or into one of its own. library: version of the cuBLASLt that it calls. norm: of x,
    which both ways compute; its weight [k]. dtype: of x; None: the weights'. bias: [n], which both ways add.
    """

    name = "few-rows"
    kind = list[FewRowsTile | None]

    def __init__(
        self,
        products: FewRowsProducts,
        weights: Sequence[Weight],
        finish: str,
        sizes: Sequence[int],
        usual: Way,
        library: int | None = None,
        norm: Norm | None = None,
        tiles: Sequence[FewRowsTile] = TILES,
        clock: CallClock = time_products,
        dtype: torch.dtype | None = None,
        bias: Tensor | None = None,
    ) -> None:
        self._products = products
        self._weights = weights
        self._finish = finish
        self._sizes = sorted(sizes)
        self._usual = usual
        self._library = library
        self._norm = norm
        self._bias = bias
        self._tiles = tiles
        self._clock = clock
        self._dtype = weights[0].dtype if dtype is None else dtype

    def describe(self) -> Facts:
        return {
            **describe_weights(self._weights, self._sizes),
            "finish": self._finish,
            "library": self._library,
            "norm": None if self._norm is None else str(self._norm[0].dtype),
            "bias": self._bias is not None,
            "tiles": [repr(tile) for tile in self._tiles],
        }

    def admits(self, answer: Sequence[FewRowsTile | None]) -> bool:
        """Tells whether all tiles of the answer can be built here. Building them is what a later start needs, too."""
        if len(answer) != len(self._sizes):
            return False
        return all(
            tile is None or (tile in self._tiles and self._is_built(tile, *operands))
            for tile, operands in zip(answer, self._make_operands(), strict=True)
        )

    def measure(self) -> list[FewRowsTile | None]:
        """Measures the fastest way for each size."""
        chosen = []
        for operands in self._make_operands():
            tiles: list[FewRowsTile | None] = [None]
            ways: list[Way] = [self._usual]
            for tile in self._tiles:
                if self._is_built(tile, *operands):
                    tiles.append(tile)
                    ways.append(partial(self._products.run, self._finish, tile, bias=self._bias, norm=self._norm))
            chosen.append(tiles[find_fastest(ways, self._weights, [operands], self._clock)])
        return chosen

    def use(self, answer: Sequence[FewRowsTile | None]) -> None:
        """Makes products of this shape and use go by the answer from now on."""
        self._products.use(self._weights[0], self._finish, self._sizes, answer)
        ours = [size for size, tile in zip(self._sizes, answer, strict=True) if tile is not None]
        logger.info("products of few rows: %s %s by our kernel for %s rows", *self._name(), ours or "no")

    def list_builds(self) -> list[Callable[[], None]]:
        x, output = next(self._make_operands())
        operands, can_run = (x, self._weights[0], output), self._products.can_run
        fitting = [tile for tile in self._tiles if can_run(self._finish, tile, *operands[:2])]
        run = partial(self._products.run, self._finish, bias=self._bias, norm=self._norm)
        return [partial(run, tile, *operands) for tile in fitting]

    def _name(self) -> tuple[str, str]:
        return " x ".join(map(str, self._weights[0].shape)), self._finish

    def _is_built(self, tile: FewRowsTile, x: Tensor, output: Tensor) -> bool:
        """Builds the kernel. Returns False if the tile does not suit the matrix or the chip."""
        weight = self._weights[0]
        if not self._products.can_run(self._finish, tile, x, weight):
            return False
        run = partial(self._products.run, self._finish, tile, x, weight, output, self._bias, self._norm)
        reason = explain_unbuilt(run)
        if reason:
            logger.info("products of few rows: %s is not used here: %s", tile, reason)
        return not reason

    def _make_operands(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Makes x [t, inputs] and output [t, outputs] of each size."""
        n, k = (weight := self._weights[0]).shape
        for size in self._sizes:
            x = torch.randn(size, k, device=weight.device, dtype=self._dtype)
            yield x, x.new_zeros(size, n if self._finish in (STORE, ADD) else n // 2)


def list_few_rows_sizes(most: int) -> list[int]:
    """Lists the numbers of rows to choose for."""
    return [size for size in _SIZES if size <= most]
