from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.fakes.cublaslt import FakeLibrary
from toka_async.kernels.cublaslt import Algorithm
from toka_async.kernels.fp8 import products as products_module
from toka_async.kernels.fp8.products import ScaledProducts, describe_scaled
from toka_async.kernels.fp8.quantize import Scaling, quantize
from toka_async.kernels.scaled_weight import ScaledWeight
from toka_async.model import fp8

SCALINGS: tuple[Scaling, ...] = ("channel", "block")
N, K = 256, 128


@pytest.fixture(autouse=True)
def aligned_as_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products_module, "ALIGNMENT", 16)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def quantized_weight(scaling: Scaling) -> ScaledWeight:
    if scaling == "block":
        values, scales = fp8.quantize(normal(N, K), 128, 128)
        return ScaledWeight(values, torch.nn.functional.pad(scales, (0, 3)))
    values, scales = fp8.quantize(normal(N, K), 1, K)
    return ScaledWeight(values, scales[:, 0].contiguous())


def chosen(scaling: Scaling, adds: bool = False) -> tuple[ScaledProducts, FakeLibrary]:
    """The library computes 5 to 8 rows."""
    library = FakeLibrary({"it": lambda _: 1.0})
    products, weight = ScaledProducts(library), quantized_weight(scaling)
    product = describe_scaled(weight, torch.float32, adds)
    products.use(product, [4, 8], [None, Algorithm("it")])
    return products, library


def stood_for(scaling: Scaling, x: Tensor) -> Tensor:
    """The product by our kernel, which other tests check."""
    return ScaledProducts().linear(quantize(x, scaling), quantized_weight(scaling), torch.float32)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize(("num_rows", "ran"), [(4, []), (5, [5]), (8, [8]), (9, [])])
def test_the_library_computes_what_it_was_chosen_for(scaling: Scaling, num_rows: int, ran: list[int]) -> None:
    products, library = chosen(scaling)
    x, bias = normal(num_rows, K), normal(N)
    rows, weight = quantize(x, scaling), quantized_weight(scaling)
    torch.testing.assert_close(products.linear(rows, weight, torch.float32), stood_for(scaling, x))
    biased = products.linear(rows, weight, torch.float32, bias)
    torch.testing.assert_close(biased, stood_for(scaling, x) + bias)
    padded = [-(-rows // 4) * 4 if scaling == "block" else rows for rows in ran]
    assert library.ran == [("it", rows) for rows in padded * 2]


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("num_rows", [3, 6])
def test_products_are_added_or_yet_to_be_added(scaling: Scaling, num_rows: int) -> None:
    products, library = chosen(scaling, adds=True)
    x, residual = normal(num_rows, K), normal(num_rows, N)
    before = residual.clone()
    output, after = products.add(residual, quantize(x, scaling), quantized_weight(scaling))
    assert after is residual
    by_library = num_rows == 6
    assert bool(library.ran) == by_library
    # Of blocks the library computes more rows than the residual has.
    assert (output is not None) == (by_library and scaling == "block")
    total = after if output is None else after + output
    torch.testing.assert_close(total, before + stood_for(scaling, x))


def test_our_kernel_computes_what_the_library_refuses() -> None:
    products, library = chosen("channel")
    library.refused.add("it")
    x = normal(6, K)
    actual = products.linear(quantize(x, "channel"), quantized_weight("channel"), torch.float32)
    assert torch.equal(actual, stood_for("channel", x))
    assert library.ran == []
