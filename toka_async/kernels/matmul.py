"""Products with a model's matrices, each by the algorithm that was fastest on this chip for about as many rows.

Measured on an H200, the library's first choice for 16,384 rows of an 8B model is 5 to 9 % slower than the best of its
proposals: chips that are out of power run slower than the library expects. Knows matrices by their shapes only.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle

import torch
import torch.nn.functional as F
from torch import Tensor

from toka_async.kernels.cublaslt import ALIGNMENT, Algorithm, Library, Product

# Milliseconds that so many calls take on the device.
Clock = Callable[[Callable[[], None], int], float]

GAIN = 0.985  # of torch's time: what is closer is torch's
_FINALISTS = 3
_ROUNDS = 3
_LEAST_MILLISECONDS = 0.5  # of a round
_LONG = 1.0  # milliseconds of a product after which the chip may have to slow down
_SUSTAINED_MILLISECONDS = 12.0  # of a round of such products: what is fastest at full speed is not always so after it
_MOST_CALLS = 8
_FAR = 128  # rows between sizes that are not alike


@dataclass(slots=True)
class _Tuned:
    """For up to sizes[i] rows, more than sizes[i - 1], the i-th algorithm; None: torch's choice."""

    sizes: list[int]
    algorithms: list[Algorithm | None]


class TunedProducts:
    """Products by tuned algorithms, and by torch for shapes that were not tuned."""

    def __init__(self, library: Library, clock: Clock) -> None:
        self._library = library
        self._clock = clock
        self._tuned: dict[Product, _Tuned] = {}

    def tune(self, weights: Sequence[Tensor], adds: bool, sizes: Sequence[int]) -> None:
        """Choose algorithms for products with `weights`, alike in shape, of up to each of `sizes` rows.

        adds: the product is added to what is there. Several weights are used in turn, as layers are, so that they are
        not found in caches. Allocates inputs and outputs of the most rows.
        """
        product, device = _product(weights[0], adds), weights[0].device
        most = max(sizes)
        x = torch.randn(most, product.k, device=device, dtype=product.dtype)
        output = torch.zeros(most, product.n, device=device, dtype=product.dtype)
        tuned, before = _Tuned(sorted(sizes), []), 0
        for size in tuned.sizes:
            # A choice is used for all numbers of rows since the size before.
            rows = [size] if size - before < _FAR else [size, (size + before) // 2]
            trial = _Trial(self._library, self._clock, product, weights, [(x[:n], output[:n]) for n in rows])
            tuned.algorithms.append(trial.fastest())
            before = size
        self._tuned[product] = tuned

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x Wᵀ: [t, k] and [n, k] to [t, n]."""
        product = _product(weight, adds=False)
        algorithm = self._choice(product, x, weight)
        if algorithm is not None:
            output = torch.empty(x.shape[0], product.n, dtype=x.dtype, device=x.device)
            if self._library.run(product, algorithm, x, weight, output):
                return output
        return F.linear(x, weight)

    def add(self, residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """residual [t, n] += x Wᵀ."""
        product = _product(weight, adds=True)
        algorithm = self._choice(product, x, weight, residual)
        if algorithm is not None and self._library.run(product, algorithm, x, weight, residual):
            return residual
        return residual.addmm_(x, weight.t())

    def _choice(self, product: Product, *operands: Tensor) -> Algorithm | None:
        tuned = self._tuned.get(product)
        num_rows = operands[0].shape[0]
        if tuned is None or not 0 < num_rows <= tuned.sizes[-1]:
            return None
        algorithm = tuned.algorithms[bisect_left(tuned.sizes, num_rows)]
        if algorithm is None or not all(x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0 for x in operands):
            return None
        return algorithm


@dataclass(slots=True)
class _Trial:
    """Which algorithm is fastest for a product, at some numbers of rows together. operands: x and output for each."""

    library: Library
    clock: Clock
    product: Product
    weights: Sequence[Tensor]
    operands: Sequence[tuple[Tensor, Tensor]]

    def fastest(self) -> Algorithm | None:
        """All run and are timed once, then the best and torch in turn, as clocks drift; None: torch's choice."""
        proposed = self.library.algorithms(self.product, self.operands[0][0].shape[0])
        algorithms = [algorithm for algorithm in proposed if self._runs(algorithm)]
        if not algorithms:
            return None
        once = [self._milliseconds(algorithm, 1) for algorithm in algorithms]
        order = sorted(range(len(algorithms)), key=once.__getitem__)[:_FINALISTS]
        finalists: list[Algorithm | None] = [None, *(algorithms[i] for i in order)]
        self._milliseconds(None, 1)  # what torch does at first use does not count
        num_calls = _calls_of_a_round(min(once) / len(self.operands))
        rounds = [[self._milliseconds(algorithm, num_calls) for algorithm in finalists] for _ in range(_ROUNDS)]
        medians = [sorted(column)[_ROUNDS // 2] for column in zip(*rounds, strict=True)]
        best = min(range(1, len(finalists)), key=medians.__getitem__)
        return finalists[best] if medians[best] < GAIN * medians[0] else None

    def _runs(self, algorithm: Algorithm) -> bool:
        weight = self.weights[0]
        return all(self.library.run(self.product, algorithm, x, weight, output) for x, output in self.operands)

    def _milliseconds(self, algorithm: Algorithm | None, num_calls: int) -> float:
        weights = cycle(self.weights)
        return sum(
            self.clock(lambda x=x, output=output: self._run(algorithm, x, next(weights), output), num_calls)  # type: ignore[misc]
            for x, output in self.operands
        )

    def _run(self, algorithm: Algorithm | None, x: Tensor, weight: Tensor, output: Tensor) -> None:
        if algorithm is not None:
            self.library.run(self.product, algorithm, x, weight, output)
        elif self.product.adds:
            output.addmm_(x, weight.t())
        else:
            torch.mm(x, weight.t(), out=output)


def _calls_of_a_round(milliseconds: float) -> int:
    """Of products that take so long each."""
    least = _SUSTAINED_MILLISECONDS if milliseconds >= _LONG else _LEAST_MILLISECONDS
    return max(1, min(_MOST_CALLS, math.ceil(least / max(milliseconds, 1e-6))))


def event_clock(call: Callable[[], None], num_calls: int) -> float:
    """Milliseconds of the calls, by events on the current stream."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(num_calls):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def tuned_sizes(graph_sizes: Sequence[int], most: int) -> list[int]:
    """Rows to tune for: those of graphs, and two sizes for each doubling after them, up to `most`."""
    sizes = [size for size in graph_sizes if size <= most] or [1]
    step = 1
    while sizes[-1] < most:
        while 4 * step <= sizes[-1]:
            step *= 2
        sizes.append(min(most, (sizes[-1] // step + 1) * step))
    return sizes


def _product(weight: Tensor, adds: bool) -> Product:
    n, k = weight.shape
    return Product(n, k, weight.dtype, adds)
