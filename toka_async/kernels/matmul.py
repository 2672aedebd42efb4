"""Products with a model's matrices by cuBLASLt, each by the algorithm that was chosen for about as many rows.

`tuning.algorithms` chooses. Knows matrices by their shapes only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from toka_async.kernels.by_rows import ByRows
from toka_async.kernels.cublaslt import ALIGNMENT, Algorithm, Library, Product


class TunedProducts:
    """Products by the chosen algorithms, and by torch for shapes that none was chosen for."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self._chosen: dict[Product, ByRows[Algorithm | None]] = {}

    def use(self, product: Product, sizes: Sequence[int], algorithms: Sequence[Algorithm | None]) -> None:
        """From now on the i-th algorithm computes up to sizes[i] rows, in ascending order; None: torch does."""
        self._chosen[product] = ByRows(list(sizes), list(algorithms))

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x Wᵀ: [t, k] and [n, k] to [t, n]."""
        product = describe_product(weight, adds=False)
        algorithm = self._choice(product, x, weight)
        if algorithm is not None:
            output = torch.empty(x.shape[0], product.n, dtype=x.dtype, device=x.device)
            if self.library.run(product, algorithm, x, weight, output):
                return output
        return F.linear(x, weight)

    def add(self, residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """residual [t, n] += x Wᵀ."""
        product = describe_product(weight, adds=True)
        algorithm = self._choice(product, x, weight, residual)
        if algorithm is not None and self.library.run(product, algorithm, x, weight, residual):
            return residual
        return residual.addmm_(x, weight.t())

    def _choice(self, product: Product, *operands: Tensor) -> Algorithm | None:
        chosen = self._chosen.get(product)
        algorithm = None if chosen is None else chosen.find(operands[0].shape[0])
        if algorithm is None or not all(x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0 for x in operands):
            return None
        return algorithm


def describe_product(weight: Tensor, adds: bool) -> Product:
    """The product with a weight [n, k], which is added to what is there, or not."""
    n, k = weight.shape
    return Product(n, k, weight.dtype, adds)
