from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from toka_async.kernels.invariant.products import InvariantOps, ProductTile, choose_tile, multiply
from toka_async.model.matrices.ops import TorchOps

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EXAMPLES = 100 if DEVICE.type == "cuda" else 10  # the interpreter is slow
SMALL = ProductTile(16, 16, 16, num_stages=2, num_warps=4)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def normal(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("num_rows", "n", "k"), [(0, 16, 16), (1, 24, 16), (16, 16, 40), (37, 50, 33), (150, 17, 8)])
def test_it_equals_the_product(num_rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    """Whole tiles and parts of them, in every direction; with and without bias and residual."""
    x, weight = normal(dtype, num_rows, k), normal(dtype, n, k) / k**0.5
    bias, residual = normal(dtype, n), normal(dtype, num_rows, n)
    exact = x.double() @ weight.double().t()
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(multiply(x, weight, tile=SMALL).double(), exact, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(
        multiply(x, weight, bias, tile=SMALL).double(), exact + bias.double(), atol=tolerance, rtol=tolerance
    )
    total = exact + bias.double() + residual.double()
    assert multiply(x, weight, bias, residual, SMALL) is residual
    torch.testing.assert_close(residual.double(), total, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_it_equals_the_product_with_the_tiles_that_are_used(dtype: torch.dtype) -> None:
    x, weight = normal(dtype, 130, 72), normal(dtype, 140, 72) / 72**0.5
    exact = x.double() @ weight.double().t()
    for num_outputs in (140, 100_000):
        product = multiply(x, weight, tile=choose_tile(num_outputs, dtype))
        torch.testing.assert_close(product.double(), exact, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@settings(max_examples=EXAMPLES, deadline=None)
@given(seed=st.integers(0, 1000), places=st.lists(st.integers(0, 60), min_size=1, max_size=4), data=st.data())
def test_a_row_is_the_same_at_any_place_among_any_rows(seed: int, places: list[int], data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(seed)
    n, k = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    row, weight, bias = (torch.randn(shape, generator=generator).to(DEVICE) for shape in ((1, k), (n, k), (n,)))
    alone = multiply(row, weight, bias, tile=SMALL)
    others = torch.randn(max(places) + 1 + data.draw(st.integers(0, 20)), k, generator=generator).to(DEVICE)
    others[places] = row
    assert torch.equal(multiply(others, weight, bias, tile=SMALL)[places], alone.expand(len(places), n))


def test_operations_equal_those_of_torch() -> None:
    ops, torch_ops = InvariantOps(), TorchOps()
    x, residual, weight = normal(torch.float32, 5, 24), normal(torch.float32, 5, 24), normal(torch.float32, 24)
    matrix, bias = normal(torch.float32, 48, 24) / 5, normal(torch.float32, 48)
    for ours, theirs in zip(
        ops.add_norm(x, residual, weight, 1e-5), torch_ops.add_norm(x, residual, weight, 1e-5), strict=True
    ):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(
        ops.gated_linear(x, matrix, bias, "silu"), torch_ops.gated_linear(x, matrix, bias, "silu")
    )
    for added in (bias[:24], None):
        hidden, total = torch_ops.add_linear(residual.clone(), x, matrix[:24], added)
        assert hidden is not None
        nothing, sums = ops.add_linear(residual.clone(), x, matrix[:24], added)
        assert nothing is None
        torch.testing.assert_close(sums, total + hidden)
