"""Lists what a start chooses for matrices with weights of the model's dtype.

`algorithms` chooses among cuBLASLt's, `gated_tiles` and `few_rows` where our kernels are faster than those.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor

from toka_async.kernels.few_rows import ADD, NORMED_DTYPES, STORE, Norm
from toka_async.kernels.fused import FusedOps
from toka_async.tuning.algorithms import AlgorithmChoice, list_product_sizes
from toka_async.tuning.few_rows import FewRowsChoice, list_few_rows_sizes
from toka_async.tuning.gated_tiles import GatedTileChoice, list_gated_sizes
from toka_async.tuning.matrix_group import MatrixGroup, RowCounts
from toka_async.tuning.settle import UsableChoice


def list_dense_choices(ops: FusedOps, group: MatrixGroup, counts: RowCounts) -> Iterator[UsableChoice[Any]]:
    """Yields choices, each to be used before the next one: later ones are between our kernels and what is used then.

    Few rows are not asked for where the numbers of rows are exact: those are of large steps.
    """
    use, most = group.use, counts.most
    weights = [matrix.plain for matrix in group.matrices if matrix.plain is not None]
    library = None if ops.products is None else ops.products.library.version
    bias = use.matrix.bias
    if ops.products is not None and bias is None:
        sizes = counts.exact or list_product_sizes(counts.graphs, most)
        yield AlgorithmChoice(ops.products, weights, use.adds, sizes)
    if ops.gates is not None and use.activation is not None and bias is None:
        separately = partial(_compute_separately, ops, use.activation)
        sizes = counts.exact or list_gated_sizes(most)
        tiles = GatedTileChoice(ops.gates, weights, use.activation, sizes, separately, library)
        if tiles.is_open:
            yield tiles
    if ops.few_rows is not None and not counts.exact:
        finish = use.activation or (ADD if use.adds else STORE)
        norm: Norm | None = None
        if use.normed is not None and weights[0].dtype in NORMED_DTYPES:
            norm = weights[0].new_ones(weights[0].shape[1], dtype=use.normed), 1e-5
        usual = partial(compute_usually, FusedOps(ops.products, ops.gates), finish, norm, bias=bias)
        sizes = list_few_rows_sizes(most)
        yield FewRowsChoice(ops.few_rows, weights, finish, sizes, usual, library, norm, bias=bias)


def _compute_separately(ops: FusedOps, activation: str, x: Tensor, weight: Tensor) -> Tensor:
    return ops.gate(ops.linear(x, weight), activation)


def compute_usually(
    ops: FusedOps,
    finish: str,
    norm: Norm | None,
    x: Tensor,
    weight: Tensor,
    output: Tensor,
    bias: Tensor | None = None,
) -> None:
    """Computes a product of few rows without our kernel for it. output: what is added to, if any."""
    if finish == ADD:
        ops.add_linear(output, x, weight, bias)
    elif finish == STORE:
        ops.linear(x, weight, bias, norm)
    else:
        ops.gated_linear(x, weight, bias, finish, norm)
