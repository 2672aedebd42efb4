from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from toka_async.checkpoint.experts_spec import CLAMPED_SWIGLU
from toka_async.checkpoint.spec import ACTIVATIONS
from toka_async.model.matrices.blocked_ops import BlockedOps
from toka_async.model.matrices.ops import TorchOps

OPS = BlockedOps()
DTYPES = (torch.float32, torch.bfloat16)


def compute_all(x: Tensor, residual: Tensor, weights: list[Tensor], activation: str) -> list[Tensor]:
    """Every operation, of rows [t, n]."""
    norm, matrix, bias = weights
    normed, total = OPS.add_norm(x, residual, norm, 1e-5)
    added, _ = OPS.add_linear(residual, x, matrix, bias)
    assert added is not None
    gated = OPS.gated_linear(x, matrix, None, activation) if len(matrix) % 2 == 0 else added
    return [normed, total, added, OPS.linear(x, matrix), gated]


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    dtype=st.sampled_from(DTYPES),
    k=st.integers(1, 400),
    n=st.one_of(st.integers(1, 20), st.integers(1, 700)),
    num_rows=st.integers(1, 120),
    offset=st.integers(0, 3),
)
def test_a_row_is_the_same_among_any_rows(
    activation: str, num_threads: int, seed: int, dtype: torch.dtype, k: int, n: int, num_rows: int, offset: int
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return (2 * torch.randn(shape, generator=generator)).to(dtype)

    weights = [normal(k), normal(n, k), normal(n)]
    x, residual = normal(num_rows + offset, k)[offset:], normal(num_rows + offset, n)[offset:]
    residual = residual if n == k else torch.zeros_like(x)
    row = int(torch.randint(num_rows, (1,), generator=generator))
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        together = compute_all(x, residual, weights, activation)
        alone = compute_all(x[row : row + 1].clone(), residual[row : row + 1].clone(), weights, activation)
    finally:
        torch.set_num_threads(before)
    for ours, theirs in zip(together, alone, strict=True):
        assert torch.equal(ours[row : row + 1], theirs)


@pytest.mark.parametrize("activation", [*ACTIVATIONS, CLAMPED_SWIGLU])
@pytest.mark.parametrize("num_rows", [0, 1, 16, 37])
def test_it_computes_what_torch_does(num_rows: int, activation: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, matrix, bias = (torch.randn(shape, generator=generator) for shape in ((num_rows, 24), (64, 24), (64,)))
    torch.testing.assert_close(OPS.linear(x, matrix, bias), TorchOps().linear(x, matrix, bias))
    gated = TorchOps().gated_linear(x, matrix, bias, activation)
    torch.testing.assert_close(OPS.gated_linear(x, matrix, bias, activation), gated)


def test_large_inputs_of_activations_are_no_nan() -> None:
    x = torch.tensor([[-1e30, -1e4, 1e4, 1e30]])
    for activation in ACTIVATIONS:
        output = OPS.gate(torch.cat([x, torch.ones_like(x)], 1), activation)
        torch.testing.assert_close(output, torch.tensor([[0.0, 0.0, 1e4, 1e30]]))
