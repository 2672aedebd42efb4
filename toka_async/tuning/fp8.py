"""Lists what a start chooses for matrices with weights of 8-bit floats: as for others, with quantized inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from toka_async.kernels.cublaslt import Algorithm
from toka_async.kernels.few_rows import ADD, NORMED_DTYPES, STORE, FewRowsTile, Norm
from toka_async.kernels.fp8.ops import ScaledKernels
from toka_async.kernels.fp8.products import ScaledProducts, count_rows, describe_scaled
from toka_async.kernels.fp8.quantize import quantize
from toka_async.kernels.fp8.scaled import multiply_scaled
from toka_async.kernels.fused import FusedOps
from toka_async.kernels.gated import RowScales, Tile
from toka_async.kernels.scaled_weight import Quantized, ScaledWeight
from toka_async.model.matrices.fp8 import Fp8Matrix
from toka_async.tuning.algorithms import AlgorithmChoice, Operands, list_product_sizes
from toka_async.tuning.few_rows import FewRowsChoice, list_few_rows_sizes
from toka_async.tuning.gated_tiles import GatedTileChoice, list_gated_sizes
from toka_async.tuning.matrix_group import MatrixGroup, RowCounts
from toka_async.tuning.settle import UsableChoice
from toka_async.tuning.store import Facts
from toka_async.tuning.trial import CallClock, time_products

# By blocks a tile's sums have to be scaled every 128 inputs, for which large ones have no registers.
GATED_TILES = {
    False: (Tile(128, 128, 128, 3, 8), Tile(64, 128, 128, 4, 4)),
    True: (Tile(64, 128, 128, 4, 8), Tile(128, 64, 128, 4, 8)),
}
FEW_ROWS_TILES = (
    FewRowsTile(rows=1, columns=8, depth=1024, num_stages=2, num_warps=4),
    FewRowsTile(rows=1, columns=8, depth=1024, num_stages=1, num_warps=4, num_ahead=2),
    FewRowsTile(rows=1, columns=8, depth=2048, num_stages=1, num_warps=8),
    FewRowsTile(rows=1, columns=8, depth=2048, num_stages=1, num_warps=8, num_ahead=1),
    FewRowsTile(rows=16, columns=16, depth=256, num_stages=4, num_warps=2),
    FewRowsTile(rows=16, columns=32, depth=128, num_stages=4, num_warps=4),
    FewRowsTile(rows=16, columns=32, depth=128, num_stages=8, num_warps=2),
)


def list_fp8_choices(ops: FusedOps, group: MatrixGroup, counts: RowCounts) -> Iterator[UsableChoice[Any]]:
    """Yields choices, each to be used before the next one; nothing where inputs stay as they are."""
    kernels, use, most = ops.scaled, group.use, counts.most
    if not isinstance(kernels, ScaledKernels):
        return
    matrices = [matrix for matrix in group.matrices if isinstance(matrix, Fp8Matrix)]
    weights, dtype = [matrix.scaled for matrix in matrices], matrices[0].dtype
    products, library = kernels.products, None
    if products.library is not None:
        library = products.library.version
        sizes = counts.exact or list_product_sizes(counts.graphs, most)
        yield ScaledAlgorithmChoice(products, weights, dtype, use.adds, sizes)
    if kernels.gates is not None and use.activation is not None and use.matrix.bias is None:
        tiles = ScaledTileChoice(
            kernels, weights, dtype, use.activation, counts.exact or list_gated_sizes(most), library
        )
        if tiles.is_open:
            yield tiles
    if kernels.few_rows is not None and not counts.exact:
        finish = use.activation or (ADD if use.adds else STORE)
        norm: Norm | None = None
        if use.normed is not None and dtype in NORMED_DTYPES:
            norm = torch.ones(weights[0].shape[1], device=weights[0].device, dtype=use.normed), 1e-5
        bias = use.matrix.bias
        usual = partial(_compute_quantized, ScaledKernels(products, kernels.gates), finish, norm, bias)
        yield FewRowsChoice(
            kernels.few_rows,
            weights,
            finish,
            list_few_rows_sizes(most),
            usual,
            library,
            norm,
            FEW_ROWS_TILES,
            dtype=dtype,
            bias=bias,
        )


class ScaledAlgorithmChoice(AlgorithmChoice):
    """The `Choice` of cuBLASLt's algorithms; None: our kernel. dtype: of x before it is quantized, and the output's."""

    name = "scaled-product"

    def __init__(
        self,
        products: ScaledProducts,
        weights: Sequence[ScaledWeight],
        dtype: torch.dtype,
        adds: bool,
        sizes: Sequence[int],
        clock: CallClock = time_products,
    ) -> None:
        assert products.library is not None
        self._products = products
        self._library = products.library
        self._weights = weights
        self._sizes = sorted(sizes)
        self._clock = clock
        self._product = describe_scaled(weights[0], dtype, adds)

    def describe(self) -> Facts:
        return {**super().describe(), "scaling": self._product.scaling, "output": str(self._product.dtype)}

    def _take(self, x: Tensor, output: Tensor) -> Operands:
        rows = quantize(x.contiguous(), self._product.scaling == "block")
        num_rows = count_rows(rows, self._product)
        return rows, output[:num_rows] if num_rows <= len(output) else output.new_zeros(num_rows, self._product.n)

    def _run(self, algorithm: Algorithm, x: Quantized, weight: ScaledWeight, output: Tensor) -> bool:
        products: ScaledProducts = self._products
        return products.run(self._product, algorithm, x, weight, output)

    def _compute_usually(self, x: Quantized, weight: ScaledWeight, output: Tensor) -> None:
        multiply_scaled(x, weight, self._product.dtype, residual=output if self._product.adds else None)


class ScaledTileChoice(GatedTileChoice):
    """The `Choice` of tiles for gated products. What follows takes quantized rows, so making these is part of a way."""

    name = "scaled-gated-product"

    def __init__(
        self,
        kernels: ScaledKernels,
        weights: Sequence[ScaledWeight],
        dtype: torch.dtype,
        activation: str,
        sizes: Sequence[int],
        library: int | None = None,
        tiles: Sequence[Tile] = (),
        clock: CallClock = time_products,
    ) -> None:
        assert kernels.gates is not None
        self._by_block = weights[0].by_block
        self._dtype = dtype
        separately = partial(_gate_separately, kernels, activation, dtype)
        tiles = tiles or GATED_TILES[self._by_block]
        super().__init__(kernels.gates, weights, activation, sizes, separately, library, tiles, clock)

    def describe(self) -> Facts:
        return {**super().describe(), "by_block": self._by_block, "output": str(self._dtype)}

    def _run(self, tile: Tile, x: Quantized, weight: ScaledWeight, output: Tensor) -> None:
        scales = RowScales(x[1], self._dtype)
        self._gates.run(self._activation, tile, x[0], weight, output, scales=scales)
        quantize(output, self._by_block)

    def _make_operands(self, num_rows: int) -> Operands:
        outputs, hidden = (weight := self._weights[0]).shape
        x = torch.randn(num_rows, hidden, device=weight.device, dtype=self._dtype)
        return quantize(x, self._by_block), x.new_empty(num_rows, outputs // 2)


def _gate_separately(
    kernels: ScaledKernels,
    activation: str,
    dtype: torch.dtype,
    rows: Quantized,
    weight: ScaledWeight,
    bias: Tensor | None = None,
) -> None:
    kernels.quantize_gate(kernels.linear(rows, weight, dtype, bias), activation, weight.by_block)


def _compute_quantized(
    kernels: ScaledKernels,
    finish: str,
    norm: Norm | None,
    bias: Tensor | None,
    x: Tensor,
    weight: ScaledWeight,
    output: Tensor,
) -> None:
    """Computes a product of few rows without our kernel for it, as `Fp8Matrix` does."""
    if norm is None:
        rows = kernels.quantize(x, weight.by_block)
    else:
        rows, _ = kernels.quantize_norm(x, None, norm, weight.by_block)
    if finish == ADD:
        kernels.add(output, rows, weight)
    elif finish == STORE:
        kernels.linear(rows, weight, x.dtype, bias)
    elif bias is not None or kernels.gated_linear(rows, weight, x.dtype, finish) is None:
        _gate_separately(kernels, finish, x.dtype, rows, weight, bias)
