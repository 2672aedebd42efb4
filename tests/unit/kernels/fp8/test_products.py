from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.fakes.cublaslt import FakeLibrary
from toka_async.kernels.cublaslt import Algorithm
from toka_async.kernels.fp8 import products as products_module
from toka_async.kernels.fp8.products import ScaledProducts, describe_scaled
from toka_async.kernels.fp8.quantize import quantize
from toka_async.kernels.scaled_weight import ScaledWeight
from toka_async.model.matrices import scaling as fp8

N, K = 256, 128


@pytest.fixture(autouse=True)
def aligned_as_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products_module, "ALIGNMENT", 16)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def quantized_weight(by_block: bool) -> ScaledWeight:
    if by_block:
        values, scales = fp8.quantize(normal(N, K), 128, 128)
        return ScaledWeight(values, torch.nn.functional.pad(scales, (0, 3)))
    values, scales = fp8.quantize(normal(N, K), 1, K)
    return ScaledWeight(values, scales[:, 0].contiguous())


def chosen(by_block: bool, adds: bool = False) -> tuple[ScaledProducts, FakeLibrary]:
    """The library computes 5 to 8 rows."""
    library = FakeLibrary({"it": lambda _: 1.0})
    products, weight = ScaledProducts(library), quantized_weight(by_block)
    product = describe_scaled(weight, torch.float32, adds)
    products.use(product, [4, 8], [None, Algorithm("it")])
    return products, library


def stood_for(by_block: bool, x: Tensor) -> Tensor:
    """The product by our kernel, which other tests check."""
    return ScaledProducts().linear(quantize(x, by_block), quantized_weight(by_block), torch.float32)


@pytest.mark.parametrize("by_block", [False, True])
@pytest.mark.parametrize(("num_rows", "ran"), [(4, []), (5, [5]), (8, [8]), (9, [])])
def test_the_library_computes_what_it_was_chosen_for(by_block: bool, num_rows: int, ran: list[int]) -> None:
    products, library = chosen(by_block)
    x, bias = normal(num_rows, K), normal(N)
    rows, weight = quantize(x, by_block), quantized_weight(by_block)
    torch.testing.assert_close(products.linear(rows, weight, torch.float32), stood_for(by_block, x))
    biased = products.linear(rows, weight, torch.float32, bias)
    torch.testing.assert_close(biased, stood_for(by_block, x) + bias)
    padded = [-(-rows // 4) * 4 if by_block else rows for rows in ran]
    assert library.ran == [("it", rows) for rows in padded * 2]


@pytest.mark.parametrize("by_block", [False, True])
@pytest.mark.parametrize("num_rows", [3, 6])
def test_products_are_added_or_yet_to_be_added(by_block: bool, num_rows: int) -> None:
    products, library = chosen(by_block, adds=True)
    x, residual = normal(num_rows, K), normal(num_rows, N)
    before = residual.clone()
    output, after = products.add(residual, quantize(x, by_block), quantized_weight(by_block))
    assert after is residual
    by_library = num_rows == 6
    assert bool(library.ran) == by_library
    # Of blocks the library computes more rows than the residual has.
    assert (output is not None) == (by_library and by_block)
    total = after if output is None else after + output
    torch.testing.assert_close(total, before + stood_for(by_block, x))


@pytest.mark.parametrize(("num_rows", "ran"), [(8, [("it", 8)]), (6, []), (1, [])])
def test_rows_that_were_gathered_have_no_padding(num_rows: int, ran: list[tuple[str, int]]) -> None:
    products, library = chosen(by_block=True)
    product = describe_scaled(quantized_weight(by_block=True), torch.float32, adds=False)
    products.use(product, [8], [Algorithm("it")])
    x = normal(num_rows, K)
    values, scales = quantize(x, by_block=True)
    output = products.linear(
        (values, torch.empty(scales.shape).copy_(scales)), quantized_weight(by_block=True), torch.float32
    )
    torch.testing.assert_close(output, stood_for(True, x))
    assert library.ran == ran


def test_our_kernel_computes_what_the_library_refuses() -> None:
    products, library = chosen(False)
    library.refused.add("it")
    x = normal(6, K)
    actual = products.linear(quantize(x, False), quantized_weight(False), torch.float32)
    assert torch.equal(actual, stood_for(False, x))
    assert library.ran == []
