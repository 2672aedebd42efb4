"""Products with quantized weights: by cuBLASLt where an algorithm of it was chosen, otherwise by our kernel.

`tuning.fp8` chooses. Knows matrices by their shapes only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from toka_async.kernels.by_rows import ByRows
from toka_async.kernels.cublaslt import ALIGNMENT, Algorithm, Library, Product
from toka_async.kernels.fp8.quantize import ROW_MULTIPLE
from toka_async.kernels.fp8.scaled import ScaledTile, multiply_scaled
from toka_async.kernels.scaled_weight import Quantized, ScaledWeight


class ScaledProducts:
    """Computes x Wᵀ of rows as `quantize` makes them."""

    def __init__(self, library: Library | None = None, tile: ScaledTile | None = None) -> None:
        """library: None: our kernel computes all. tile: of our kernel for any number of rows; None: by rows."""
        self.library = library
        self._tile = tile
        self._chosen: dict[Product, ByRows[Algorithm | None]] = {}

    def use(self, product: Product, sizes: Sequence[int], algorithms: Sequence[Algorithm | None]) -> None:
        """From now on the i-th algorithm computes up to sizes[i] rows, in ascending order; None: our kernel does."""
        self._chosen[product] = ByRows(list(sizes), list(algorithms))

    def linear(self, rows: Quantized, weight: ScaledWeight, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        """x Wᵀ + b: [t, k] and [n, k] to [t, n] of the dtype."""
        output = self._compute_chosen(describe_scaled(weight, dtype, adds=False), rows, weight)
        if output is None:
            return multiply_scaled(rows, weight, dtype, bias, tile=self._tile)
        return output if bias is None else output.add_(bias)

    def add(self, residual: Tensor, rows: Quantized, weight: ScaledWeight) -> tuple[Tensor | None, Tensor]:
        """Returns x Wᵀ [t, n], which is yet to be added, or None if it was added in place; and the residual."""
        product = describe_scaled(weight, residual.dtype, adds=True)
        output = self._compute_chosen(product, rows, weight, residual if product.adds else None)
        if output is None:
            return None, multiply_scaled(rows, weight, residual.dtype, residual=residual, tile=self._tile)
        return None if product.adds else output, residual

    def run(
        self, product: Product, algorithm: Algorithm, rows: Quantized, weight: ScaledWeight, output: Tensor
    ) -> bool:
        """Computes into output [`count_rows`, n]; returns False, with nothing done, if the algorithm cannot."""
        assert self.library is not None
        return self.library.run(product, algorithm, rows[0], weight.values, output, (rows[1], weight.scales))

    def _compute_chosen(
        self, product: Product, rows: Quantized, weight: ScaledWeight, output: Tensor | None = None
    ) -> Tensor | None:
        """Returns None, with nothing done, where no algorithm was chosen."""
        chosen, num_rows = self._chosen.get(product), len(rows[0])
        algorithm = None if chosen is None else chosen.find(num_rows)
        if algorithm is None:
            return None
        between = rows[1].stride(1)  # the scales of two groups
        if product.scaling == "block" and (between < num_rows or between % ROW_MULTIPLE):  # gathered from ranks
            if num_rows % ROW_MULTIPLE:
                return None
            rows = rows[0], rows[1].T.clone(memory_format=torch.contiguous_format).T
        if output is None:
            output = torch.empty(count_rows(rows, product), product.n, dtype=product.dtype, device=weight.device)
        if any(x.data_ptr() % ALIGNMENT for x in (rows[0], output)):
            return None
        is_done = self.run(product, algorithm, rows, weight, output)
        return output[:num_rows] if is_done else None


def describe_scaled(weight: ScaledWeight, dtype: torch.dtype, adds: bool) -> Product:
    """The product with a weight, as cuBLASLt computes it.

    By blocks it is never added in place: it has a multiple of 4 rows, for which the residual has no memory.
    """
    n, k = weight.shape
    return Product(n, k, dtype, adds and not weight.by_block, "block" if weight.by_block else "channel")


def count_rows(rows: Quantized, product: Product) -> int:
    """Counts the rows that cuBLASLt computes: those between the scales of two groups."""
    return rows[1].stride(1) if product.scaling == "block" else len(rows[0])
