"""Products by cuBLASLt and by our kernel against torch's: every algorithm and tile, and what tuning makes of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

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
    from toka_async.kernels.matmul import TunedProducts
    from toka_async.tuning.algorithms import AlgorithmChoice

    device = torch.device("cuda")
    products = TunedProducts(CublasLt(device))
    weights = [torch.randn(4096, 1024, device=device, dtype=torch.bfloat16) / 32 for _ in range(3)]
    choice = AlgorithmChoice(products, weights, adds, [1, 16, 512, 2048])
    chosen = choice.measure()
    assert choice.admits(chosen)
    choice.use(chosen)
    for m in (1, 5, 16, 300, 2048, 3000):
        x = torch.randn(m, 1024, device=device, dtype=torch.bfloat16)
        residual = torch.randn(m, 4096, device=device, dtype=torch.bfloat16)
        exact = x.double() @ weights[1].double().T + (residual.double() if adds else 0)
        result = products.add(residual, x, weights[1]) if adds else products.linear(x, weights[1])
        assert (result.double() - exact).abs().max() < 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("inner", "hidden"), [(256, 512), (4864, 896), (8192, 2048), (200, 72), (136, 40)])
def test_every_tile_of_the_gated_product(inner: int, hidden: int, dtype: torch.dtype) -> None:
    from toka_async.kernels.gated import GatedProducts
    from toka_async.tuning.gated_tiles import TILES, GatedTileChoice

    device = torch.device("cuda")
    if torch.cuda.get_device_capability(device) < (9, 0):
        pytest.skip("needs a GPU that copies tensors")

    def slowly(x: Tensor, weight: Tensor) -> Tensor:
        torch.cuda._sleep(10_000_000)  # type: ignore[no-untyped-call]
        return x @ weight.T

    generator = torch.Generator(device).manual_seed(0)
    weight = torch.randn(2 * inner, hidden, device=device, dtype=dtype, generator=generator) / hidden**0.5
    for tile in TILES:
        gates = GatedProducts(132, fewest=1)
        choice = GatedTileChoice(gates, [weight], "silu", [4096], slowly, tiles=[tile])
        assert choice.is_open
        choice.use(choice.measure())
        for m in (1, 63, 64, 129, 1000, 2200, 4096):
            x = torch.randn(m, hidden, device=device, dtype=dtype, generator=generator)
            output = gates.compute(x, weight, "silu")
            assert output is not None
            gate, up = (x.double() @ weight.double().T).chunk(2, dim=1)
            exact = torch.nn.functional.silu(gate) * up
            assert (output.double() - exact).norm() / exact.norm() < 4e-3
            assert (output.double() - exact).abs().max() < 0.1
