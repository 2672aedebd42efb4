"""Computes products with a model's matrices for many numbers of rows, so that a library's kernels are loaded.

cuBLAS has a kernel for each shape of tile, and chooses one by the number of rows. A driver loads a kernel when it is
first used, and waits until the device has nothing left to compute: in a step, the device would then wait for the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from toka_async.checkpoint.limits import RankLimits
from toka_async.model.decoder import RankModel
from toka_async.model.matrices.matrix import MatrixUse
from toka_async.tuning.matrix_group import group_matrices

_STEP = 8  # rows between small products, for which other tiles are chosen
_SMALL = 1024
_STEPS = 32  # to twice as many rows, of large products


@torch.inference_mode()
def load_products(decoder: RankModel, limits: RankLimits, dtype: torch.dtype, device: torch.device) -> None:
    """Computes each product that steps within the limits have. It takes the memory of one product of the most rows."""
    for group in group_matrices(decoder):
        most = limits.max_seqs if group.use.of_samples else limits.max_tokens
        compute = _make_product(group.use, most, dtype, device)
        for num_rows in list_row_counts(most):
            compute(num_rows)


def list_row_counts(most: int) -> Iterator[int]:
    """Yields numbers of rows, ascending to the most."""
    num_rows = _STEP
    while num_rows < most:
        yield num_rows
        num_rows += max(_STEP, num_rows // _STEPS) if num_rows >= _SMALL else _STEP
    yield most


def _make_product(use: MatrixUse, most: int, dtype: torch.dtype, device: torch.device) -> Callable[[int], None]:
    matrix = use.matrix
    n, k = matrix.shape
    x = torch.zeros(most, k, dtype=dtype, device=device)
    norm = None if use.normed is None else (x.new_ones(k, dtype=use.normed), 1e-5)  # part of products of few rows
    residual = torch.zeros(most, n, dtype=dtype, device=device) if use.adds else None

    def compute(num_rows: int) -> None:
        rows = replace(matrix.take(x[:num_rows]), norm=norm)
        if use.activation is not None:
            matrix.gated(rows, use.activation, matrix)  # whoever consumes it; what counts is the form of its input
        elif residual is not None:
            matrix.add(residual[:num_rows], rows)
        else:
            matrix.product(rows)

    return compute
