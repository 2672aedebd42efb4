"""Chooses cuBLASLt's algorithms for products with a model's matrices, by their numbers of rows.

Measured on an H200, the library's first choice for 16,384 rows of an 8B model is 5 to 9 % slower than its best
proposal: a chip that reaches its power limit runs slower than the library expects. Knows matrices by their shapes only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from toka_async.kernels.cublaslt import Algorithm
from toka_async.kernels.matmul import TunedProducts, describe_product
from toka_async.kernels.scaled_weight import Weight
from toka_async.tuning.store import Facts
from toka_async.tuning.trial import CallClock, Way, find_fastest, pick_rows_to_time, time_products

Operands = tuple[Any, Tensor]  # x in the form that the ways to compute take, and the output
Words = list[int] | None  # of an algorithm, as the library saves it; None: torch's choice


class AlgorithmChoice:
    """The `Choice` of an algorithm for up to each of `sizes` rows, in ascending order.

    weights: alike in shape, used in turn as layers are, so that they are not found in caches. adds: the product is
    added to the output's content. Measuring allocates inputs and outputs of the most rows.
    """

    name = "product"
    kind = list[Words]

    def __init__(
        self,
        products: TunedProducts,
        weights: Sequence[Tensor],
        adds: bool,
        sizes: Sequence[int],
        clock: CallClock = time_products,
    ) -> None:
        self._products: Any = products  # those of a weight's format
        self._library = products.library
        self._weights: Sequence[Any] = weights
        self._sizes = sorted(sizes)
        self._clock = clock
        self._product = describe_product(weights[0], adds)

    def describe(self) -> Facts:
        return {
            **describe_weights(self._weights, self._sizes),
            "adds": self._product.adds,
            "library": self._library.version,
        }

    def admits(self, answer: Sequence[Words]) -> bool:
        """Tells whether the answer computes here. Every product runs once, torch's too: first use loads kernels."""
        if len(answer) != len(self._sizes):
            return False
        try:
            algorithms = self._restore(answer)
        except ValueError:
            return False
        for algorithm, operands in zip(algorithms, self._make_operands(), strict=True):
            if algorithm is None:
                for x, output in operands:
                    self._compute_usually(x, self._weights[0], output)
            elif not self._can_run(algorithm, operands):
                return False
        return True

    def measure(self) -> list[Words]:
        chosen = [self._find_fastest(operands) for operands in self._make_operands()]
        return [None if algorithm is None else self._library.save(algorithm) for algorithm in chosen]

    def use(self, answer: Sequence[Words]) -> None:
        """Makes products of this shape use the answer from now on."""
        self._products.use(self._product, self._sizes, self._restore(answer))

    def list_builds(self) -> list[Callable[[], None]]:
        return []  # the library is compiled

    def _restore(self, answer: Sequence[Words]) -> list[Algorithm | None]:
        return [None if words is None else self._library.restore(words) for words in answer]

    def _find_fastest(self, operands: Sequence[Operands]) -> Algorithm | None:
        algorithms: list[Algorithm | None] = [None]
        ways: list[Way] = [self._compute_usually]
        for algorithm in self._library.algorithms(self._product, len(operands[0][1])):
            if self._can_run(algorithm, operands):
                algorithms.append(algorithm)
                ways.append(partial(self._run, algorithm))
        return algorithms[find_fastest(ways, self._weights, operands, self._clock)]

    def _can_run(self, algorithm: Algorithm, operands: Sequence[Operands]) -> bool:
        return all(self._run(algorithm, x, self._weights[0], output) for x, output in operands)

    def _make_operands(self) -> Iterator[list[Operands]]:
        """Makes x and output at each number of rows that the choice for a size is for, size by size."""
        product, device, most = self._product, self._weights[0].device, self._sizes[-1]
        x = torch.randn(most, product.k, device=device, dtype=product.dtype)
        output = torch.zeros(most, product.n, device=device, dtype=product.dtype)
        for size, before in zip(self._sizes, [0, *self._sizes], strict=False):
            yield [self._take(x[:n], output) for n in pick_rows_to_time(size, before)]

    def _take(self, x: Tensor, output: Tensor) -> Operands:
        """Returns x [t, k] and so many rows of an output in the form that the ways to compute take."""
        return x, output[: len(x)]

    def _run(self, algorithm: Algorithm, x: Any, weight: Any, output: Tensor) -> bool:
        return self._library.run(self._product, algorithm, x, weight, output)

    def _compute_usually(self, x: Any, weight: Any, output: Tensor) -> None:
        if self._product.adds:
            output.addmm_(x, weight.t())
        else:
            torch.mm(x, weight.t(), out=output)


def describe_weights(weights: Sequence[Weight], sizes: Sequence[int]) -> dict[str, object]:
    """Describes on what the fastest ways depend. The number of weights says whether they stay in caches."""
    weight = weights[0]
    return {"shape": list(weight.shape), "dtype": str(weight.dtype), "weights": len(weights), "sizes": list(sizes)}


def list_product_sizes(graph_sizes: Sequence[int], most: int) -> list[int]:
    """Lists the rows to choose for: those of graphs, then two sizes for each doubling, up to `most`."""
    sizes = [size for size in graph_sizes if size <= most] or [1]
    step = 1
    while sizes[-1] < most:
        while 4 * step <= sizes[-1]:
            step *= 2
        sizes.append(min(most, (sizes[-1] // step + 1) * step))
    return sizes
