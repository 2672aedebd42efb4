from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.fakes.cublaslt import FakeLibrary
from toka_async.kernels import matmul
from toka_async.kernels.cublaslt import Algorithm
from toka_async.kernels.fused import FusedOps
from toka_async.kernels.matmul import TunedProducts, describe_product

N, K = 64, 32


@pytest.fixture(autouse=True)
def aligned_as_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "ALIGNMENT", 16)


def weight() -> Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(1))


def tuned(library: FakeLibrary, adds: bool = False) -> TunedProducts:
    """Up to 8 rows."""
    products = TunedProducts(library)
    products.use(describe_product(weight(), adds), [8], [Algorithm("fast")])
    return products


def test_each_algorithm_computes_up_to_its_number_of_rows() -> None:
    library = FakeLibrary({"few": lambda _: 1, "many": lambda _: 1})
    products = TunedProducts(library)
    products.use(describe_product(weight(), False), [2, 8, 16], [Algorithm("few"), None, Algorithm("many")])
    for num_rows in (1, 2, 3, 8, 9, 16):
        x = torch.randn(num_rows, K)
        torch.testing.assert_close(products.linear(x, weight()), x @ weight().T)
    assert library.ran == [("few", 1), ("few", 2), ("many", 9), ("many", 16)]


@pytest.mark.parametrize("adds", [False, True])
def test_torch_computes_what_was_not_tuned_or_fails_later(adds: bool) -> None:
    library = FakeLibrary({"fast": lambda _: 1})
    products = tuned(library, adds)

    def check(x: Tensor, matrix: Tensor) -> None:
        residual = torch.ones(len(x), len(matrix))
        result = products.add(residual, x, matrix) if adds else products.linear(x, matrix)
        torch.testing.assert_close(result, x @ matrix.T + (1 if adds else 0))
        assert not library.ran

    check(torch.randn(9, K), weight())  # too many rows
    check(torch.randn(0, K), weight())
    check(torch.randn(3, K), torch.randn(N + 1, K))
    check(torch.randn(3, 2 * K)[:, :K], weight())  # not contiguous
    check(torch.randn(4, K).view(-1)[1 : 1 + 3 * K].view(3, K), weight())  # at an odd address
    library.refused = {"fast"}
    check(torch.randn(3, K), weight())


def test_added_in_place() -> None:
    library, x, residual = FakeLibrary({"fast": lambda _: 1}), torch.randn(3, K), torch.randn(3, N)
    expected = residual + x @ weight().T
    ops = FusedOps(tuned(library, adds=True))
    rest, total = ops.add_linear(residual, x, weight(), None)
    assert rest is None
    assert total is residual
    torch.testing.assert_close(residual, expected)
    assert library.ran == [("fast", 3)]


def test_products_with_a_bias_are_torchs() -> None:
    library, x, bias = FakeLibrary({"fast": lambda _: 1}), torch.randn(3, K), torch.randn(N)
    ops = FusedOps(tuned(library))
    torch.testing.assert_close(ops.linear(x, weight(), bias), x @ weight().T + bias)
    rest, total = ops.add_linear(torch.zeros(3, N), x, weight(), bias)
    assert rest is not None
    torch.testing.assert_close(rest + total, x @ weight().T + bias)
    assert not library.ran
