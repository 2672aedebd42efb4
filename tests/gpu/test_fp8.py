"""8-bit weights on a GPU: what cuBLASLt computes with scales, and whole models against dequantized ones.

The kernels are compared with their reference in tests/unit/kernels, which runs them compiled where there is a GPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.cases.models import make_checkpoint
from tests.cases.quantized import BLOCKS, CHANNELS, SIZES, TENSORS, dequantize_checkpoint, quantize_checkpoint
from tests.drivers.engine import Engine
from tests.gpu.test_decoder import logits_on
from toka_async.checkpoint.hub import resolve_model
from toka_async.model.matrices import scaling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
        reason="needs a CUDA device that multiplies 8-bit floats",
    ),
]
SHAPES = [(8, 512, 256), (64, 6144, 4096), (1000, 1536, 896), (1001, 4096, 14_336), (4096, 2048, 8192)]
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def normal(*shape: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)


@pytest.mark.skipif(not IS_HOPPER, reason="cuBLASLt has these scales on Hopper")
@pytest.mark.parametrize("by_block", [False, True])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_every_algorithm_computes_the_product(m: int, n: int, k: int, adds: bool, by_block: bool) -> None:
    from toka_async.kernels.cublaslt import CublasLt
    from toka_async.kernels.fp8.products import ScaledProducts, count_rows, describe_scaled
    from toka_async.kernels.fp8.quantize import quantize
    from toka_async.kernels.scaled_weight import ScaledWeight

    tile = (128, 128) if by_block else (1, k)
    values, found = scaling.quantize(normal(n, k) / k**0.5, *tile)
    scales = torch.nn.functional.pad(found, (0, -found.shape[1] % 4)) if by_block else found[:, 0].contiguous()
    rows, weight = quantize(normal(m, k), by_block), ScaledWeight(values, scales)
    products = ScaledProducts(CublasLt(torch.device("cuda")))
    assert products.library is not None
    product = describe_scaled(weight, torch.bfloat16, adds)
    num_rows = count_rows(rows, product)
    before = normal(num_rows, n)
    exact = scaling.dequantize(*rows, 1, tile[1]).double() @ scaling.dequantize(values, found, *tile).double().T
    if product.adds:
        exact += before[:m].double()
    algorithms = products.library.algorithms(product, num_rows)
    # Of few rows and many inputs the library may have none by channel; our kernel computes those.
    assert algorithms or (not by_block and m <= 256)
    for algorithm in algorithms:
        output = before.clone()
        if products.run(product, algorithm, rows, weight, output):
            assert (output[:m].double() - exact).norm() / exact.norm() < 5e-3
            assert (output[:m].double() - exact).abs().max() < 0.1


@pytest.mark.parametrize("by_block", [False, True])
@pytest.mark.parametrize("adds", [False, True])
def test_tuned_products(by_block: bool, adds: bool) -> None:
    """Whatever computes them, products are those of our kernel."""
    from toka_async.kernels.cublaslt import CublasLt
    from toka_async.kernels.fp8.products import ScaledProducts
    from toka_async.kernels.fp8.quantize import quantize
    from toka_async.kernels.scaled_weight import ScaledWeight
    from toka_async.tuning.fp8 import ScaledAlgorithmChoice

    tile, weights = (128, 128) if by_block else (1, 1024), []
    for seed in range(3):
        values, scales = scaling.quantize(normal(4096 + 128 * seed, 1024)[:4096] / 32, *tile)
        weights.append(ScaledWeight(values, scales if by_block else scales[:, 0].contiguous()))
    products, ours = ScaledProducts(CublasLt(torch.device("cuda"))), ScaledProducts()
    choice = ScaledAlgorithmChoice(products, weights, torch.bfloat16, adds, [1, 16, 512, 2048])
    chosen = choice.measure()
    assert choice.admits(chosen)
    choice.use(chosen)
    for m in (1, 5, 16, 300, 511, 2048, 3000):
        rows, results = quantize(normal(m, 1024), by_block), []
        for way in (products, ours):
            residual = torch.zeros(m, 4096, device="cuda", dtype=torch.bfloat16)
            if adds:
                added, residual = way.add(residual, rows, weights[1])
                results.append(residual if added is None else residual + added)
            else:
                results.append(way.linear(rows, weights[1], torch.bfloat16))
        assert (results[0].float() - results[1].float()).abs().max() < 0.05


@pytest.mark.parametrize("by_block", [False, True])
def test_every_tile_of_few_rows_and_of_gated_products(by_block: bool) -> None:
    from toka_async.kernels.few_rows import FewRowsProducts
    from toka_async.kernels.fp8.quantize import quantize
    from toka_async.kernels.gated import GatedProducts, RowScales
    from toka_async.kernels.scaled_weight import ScaledWeight
    from toka_async.tuning.fp8 import FEW_ROWS_TILES, GATED_TILES

    inner, hidden = 1024, 2048
    tile = (128, 128) if by_block else (1, hidden)
    values, found = scaling.quantize(normal(2 * inner, hidden) / hidden**0.5, *tile)
    weight = ScaledWeight(values, found if by_block else found[:, 0].contiguous())
    numbers = scaling.dequantize(values, found, *tile).double()

    def gate(x: Tensor) -> Tensor:
        halves = (x.double() @ numbers.T).chunk(2, dim=1)
        return torch.nn.functional.silu(halves[0]) * halves[1]

    few = FewRowsProducts(1 << 24, 800)
    for each in FEW_ROWS_TILES:
        for m in (1, 7, 16):
            x, output = normal(m, hidden), normal(m, inner)
            if few.can_run("silu", each, x, weight):
                few.run("silu", each, x, weight, output)
                assert (output.double() - gate(x)).norm() / gate(x).norm() < 6e-3
    if torch.cuda.get_device_capability() < (9, 0):
        return
    for tiles in GATED_TILES[by_block]:
        for m in (64, 129, 1000):
            rows, output = quantize(normal(m, hidden), by_block), normal(m, inner)
            GatedProducts(132).run("silu", tiles, rows[0], weight, output, scales=RowScales(rows[1], output.dtype))
            exact = gate(scaling.dequantize(*rows, 1, tile[1]))
            assert (output.double() - exact).norm() / exact.norm() < 6e-3


PUBLISHED = {"blocks": BLOCKS, "channels": CHANNELS, "tensors": TENSORS}


@pytest.mark.parametrize("kind", PUBLISHED)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logits(tmp_path: Path, family: str, kind: str) -> None:
    """Against the CPU's, which dequantizes weights and does not round inputs."""
    from toka_async.kernels.fp8.ops import ScaledKernels
    from toka_async.kernels.fp8.products import ScaledProducts
    from toka_async.kernels.fused import FusedOps

    dense = make_checkpoint(tmp_path / "dense", family, **SIZES)
    folder = quantize_checkpoint(dense, tmp_path / "quantized", PUBLISHED[kind])
    exact = logits_on(dequantize_checkpoint(folder, tmp_path / "exact"), torch.device("cpu"), torch.float32)
    for dtype in (torch.float32, torch.bfloat16):
        ops = FusedOps(scaled=ScaledKernels(ScaledProducts()))
        ours = logits_on(folder, torch.device("cuda"), dtype, ops)
        assert (ours - exact).norm() / exact.norm() < 0.08


@pytest.mark.parametrize("max_graph_seqs", [0, 32])
def test_the_built_in_model_answers_almost_as_on_a_cpu(max_graph_seqs: int, tmp_path: Path) -> None:
    """Tuned, in graphs and not: of greedy tokens rounding changes few."""
    folder, answers = resolve_model("demo"), []
    prompts = [[(7 * row + 13 * place) % 180 + 20 for place in range(20 + 5 * row)] for row in range(24)]
    for device, dtype in (("cpu", "float32"), ("cuda", "bfloat16")):
        engine = Engine(
            folder,
            device=device,
            dtype=dtype,
            quantize="fp8",
            max_seqs=32,
            max_tokens=256,
            num_tokens=16384,
            max_graph_seqs=max_graph_seqs,
            tuning_dir=str(tmp_path),
        )
        received = engine.run(prompts, max_tokens=8)
        answers.append([each.samples[0].token_ids for each in received])
    same = sum(a == b for pair in zip(*answers, strict=True) for a, b in zip(*pair, strict=True))
    assert same > 0.6 * 24 * 8
