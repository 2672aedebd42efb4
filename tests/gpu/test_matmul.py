"""Products by cuBLASLt against torch's: every algorithm that it proposes, and what tuning makes of them."""

from __future__ import annotations

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPES = [(1, 512, 256), (7, 4096, 1024), (64, 6144, 4096), (1000, 1536, 896), (4096, 2048, 8192)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_every_algorithm_computes_the_product(m: int, n: int, k: int, adds: bool, dtype: torch.dtype) -> None:
    from toka_async.kernels.cublaslt import CublasLt, Product

    device = torch.device("cuda")
    library, product = CublasLt(device), Product(n, k, dtype, adds)
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(m, k, device=device, dtype=dtype, generator=generator)
    weight = torch.randn(n, k, device=device, dtype=dtype, generator=generator) / k**0.5
    before = torch.randn(m, n, device=device, dtype=dtype, generator=generator)
    exact = x.double() @ weight.double().T + (before.double() if adds else 0)
    algorithms = library.algorithms(product, m)
    assert algorithms
    num_ran = 0
    for algorithm in algorithms:
        output = before.clone()
        if library.run(product, algorithm, x, weight, output):
            num_ran += 1
            assert (output.double() - exact).abs().max() < 0.05
    assert num_ran


@pytest.mark.parametrize("adds", [False, True])
def test_tuned_products(adds: bool) -> None:
    from toka_async.kernels.cublaslt import CublasLt
    from toka_async.kernels.matmul import TunedProducts, event_clock

    device = torch.device("cuda")
    products = TunedProducts(CublasLt(device), event_clock)
    weights = [torch.randn(4096, 1024, device=device, dtype=torch.bfloat16) / 32 for _ in range(3)]
    products.tune(weights, adds, [1, 16, 512, 2048])
    for m in (1, 5, 16, 300, 2048, 3000):
        x = torch.randn(m, 1024, device=device, dtype=torch.bfloat16)
        residual = torch.randn(m, 4096, device=device, dtype=torch.bfloat16)
        exact = x.double() @ weights[1].double().T + (residual.double() if adds else 0)
        result = products.add(residual, x, weights[1]) if adds else products.linear(x, weights[1])
        assert (result.double() - exact).abs().max() < 0.05
