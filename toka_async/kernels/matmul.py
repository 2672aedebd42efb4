"""Products with a model's matrices, each by the algorithm that was fastest on this chip for about as many rows.

Measured on an H200, the library's first choice for 16,384 rows of an 8B model is 5 to 9 % slower than the best of its
proposals: chips that are out of power run slower than the library expects. Knows matrices by their shapes only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from toka_async.kernels.cublaslt import ALIGNMENT, Algorithm, Library, Product
from toka_async.kernels.trial import ByRows, Clock, Way, fastest, rows_to_time


class TunedProducts:
    """Products by tuned algorithms, and by torch for shapes that were not tuned."""

    def __init__(self, library: Library, clock: Clock) -> None:
        self.library_version = library.version
        self._library = library
        self._clock = clock
        self._tuned: dict[Product, ByRows[Algorithm | None]] = {}  # None: torch's choice

    def tune(self, weights: Sequence[Tensor], adds: bool, sizes: Sequence[int]) -> None:
        """Choose algorithms for products with `weights`, alike in shape, of up to each of `sizes` rows.

        adds: the product is added to what is there. Several weights are used in turn, as layers are, so that they are
        not found in caches. Allocates inputs and outputs of the most rows.
        """
        product = _product(weights[0], adds)
        tuned = ByRows[Algorithm | None](sorted(sizes), [])
        for operands in _operands(product, weights[0].device, tuned.sizes):
            tuned.choices.append(self._fastest(product, weights, operands))
        self._tuned[product] = tuned

    def chosen(self, weight: Tensor, adds: bool) -> list[list[int] | None]:
        """What `tune` has chosen for each of its sizes, in ascending order, to be adopted by another process."""
        choices = self._tuned[_product(weight, adds)].choices
        return [None if algorithm is None else self._library.save(algorithm) for algorithm in choices]

    def adopt(self, weight: Tensor, adds: bool, sizes: Sequence[int], chosen: Sequence[Sequence[int] | None]) -> bool:
        """Take what was chosen before in place of tuning; False, with nothing changed: not all of it computes here.

        All of it computes once, torch's choices too: libraries load kernels at their first use.
        """
        product = _product(weight, adds)
        if len(chosen) != len(sizes):
            return False
        try:
            algorithms = [None if saved is None else self._library.restore(saved) for saved in chosen]
        except ValueError:
            return False
        tuned = ByRows[Algorithm | None](sorted(sizes), algorithms)
        for algorithm, operands in zip(algorithms, _operands(product, weight.device, tuned.sizes), strict=True):
            if algorithm is None:
                for x, output in operands:
                    _by_torch(product, x, weight, output)
            elif not self._runs(product, algorithm, weight, operands):
                return False
        self._tuned[product] = tuned
        return True

    def _fastest(
        self, product: Product, weights: Sequence[Tensor], operands: Sequence[tuple[Tensor, Tensor]]
    ) -> Algorithm | None:
        algorithms: list[Algorithm | None] = [None]
        ways: list[Way] = [partial(_by_torch, product)]
        for algorithm in self._library.algorithms(product, len(operands[0][0])):
            if self._runs(product, algorithm, weights[0], operands):
                algorithms.append(algorithm)
                ways.append(partial(self._library.run, product, algorithm))
        return algorithms[fastest(ways, weights, operands, self._clock)]

    def _runs(
        self, product: Product, algorithm: Algorithm, weight: Tensor, operands: Sequence[tuple[Tensor, Tensor]]
    ) -> bool:
        return all(self._library.run(product, algorithm, x, weight, output) for x, output in operands)

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
        algorithm = None if tuned is None else tuned.of(len(operands[0]))
        if algorithm is None or not all(x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0 for x in operands):
            return None
        return algorithm


def _operands(product: Product, device: torch.device, sizes: Sequence[int]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """x and output at each number of rows that the choice for an ascending size is for."""
    x = torch.randn(sizes[-1], product.k, device=device, dtype=product.dtype)
    output = torch.zeros(sizes[-1], product.n, device=device, dtype=product.dtype)
    for size, before in zip(sizes, [0, *sizes], strict=False):
        yield [(x[:n], output[:n]) for n in rows_to_time(size, before)]


def _by_torch(product: Product, x: Tensor, weight: Tensor, output: Tensor) -> None:
    if product.adds:
        output.addmm_(x, weight.t())
    else:
        torch.mm(x, weight.t(), out=output)


def _product(weight: Tensor, adds: bool) -> Product:
    n, k = weight.shape
    return Product(n, k, weight.dtype, adds)
