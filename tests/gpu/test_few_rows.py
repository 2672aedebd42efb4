"""Products of few rows by our kernel, alone and in graphs whose kernels start before the ones in front have ended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.drivers.gpu_models import Reference, WatchedEngine, make_model
from tests.gpu.test_parity import LOGPROBS, NUM_TOKENS, Case, Errors, alone, check
from toka_async.cli import main
from toka_async.kernels.few_rows import ADD, STORE, FewRowsProducts, FewRowsTile
from toka_async.kernels.fused import FusedOps
from toka_async.model.matrices.ops import TorchOps
from toka_async.tuning.few_rows import TILES, FewRowsChoice

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

DEVICE = torch.device("cuda")
SIZES = [1, 2, 4, 8, 16]
FETCHED = 16 << 20


def normal(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=dtype, generator=generator)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("finish", [STORE, ADD, "silu"])
@pytest.mark.parametrize(("n", "k"), [(2048, 2048), (16384, 2048), (2048, 8192), (9728, 896), (128256, 1024)])
def test_every_tile(n: int, k: int, finish: str, dtype: torch.dtype) -> None:
    generator = torch.Generator(DEVICE).manual_seed(0)
    products, num_ran = FewRowsProducts(FETCHED, 800), 0
    weight, bias = normal(generator, n, k, dtype=dtype) / k**0.5, normal(generator, n, dtype=dtype)
    for num_rows in (1, 3, 16):
        x, before = normal(generator, num_rows, k, dtype=dtype), normal(generator, num_rows, n, dtype=dtype)
        exact = x.double() @ weight.double().T + bias
        if finish == ADD:
            exact = exact + before
        elif finish != STORE:
            exact = TorchOps().gate(exact, finish)
        for tile in TILES:
            if products.can_run(finish, tile, x, weight):
                output = before[:, : exact.shape[1]].clone(memory_format=torch.contiguous_format)
                products.run(finish, tile, x, weight, output, bias)
                assert (output.double() - exact).norm() / exact.norm() < 4e-3
                assert (output.double() - exact).abs().max() < 0.1
                num_ran += 1
    assert num_ran >= 3  # of one row, of three and of 16


@pytest.mark.parametrize("num_rows", [1, 3, 16])
@pytest.mark.parametrize(("n", "k"), [(3072, 2048), (6144, 4096), (9728, 896)])
def test_every_tile_with_a_norm(n: int, k: int, num_rows: int) -> None:
    generator, num_ran = torch.Generator(DEVICE).manual_seed(0), 0
    weight, x = normal(generator, n, k) / k**0.5, normal(generator, num_rows, k) * 5
    norm = normal(generator, k) / 4 + 1, 1e-5
    exact = TorchOps().linear(x.double(), weight.double(), None, (norm[0].double(), norm[1]))
    products, output = FewRowsProducts(FETCHED, 800), x.new_empty(num_rows, n)
    for tile in TILES:
        if products.can_run(STORE, tile, x, weight):
            products.run(STORE, tile, x, weight, output, norm=norm)
            assert (output.double() - exact).norm() / exact.norm() < 5e-3
            num_ran += 1
    assert num_ran


def test_a_graph_computes_what_separate_kernels_do() -> None:
    """Layers of norms and products over little memory, so that a kernel that starts too early reads what is old."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    layers = [
        (
            normal(generator, 2048) / 8 + 1,
            normal(generator, 2048, 2048) / 64,
            normal(generator, 8192, 2048) / 64,
            normal(generator, 2048, 4096) / 64,
        )
        for _ in range(12)
    ]
    products = FewRowsProducts(FETCHED, 800)
    for weight, finish in zip(layers[0][1:], (STORE, "silu", ADD), strict=True):
        tiles = [tile for rows in (1, 16) for tile in TILES if tile.rows == rows and weight.shape[1] % tile.depth == 0]
        by_rows = {tile.rows: tile for tile in tiles}
        products.use(weight, finish, [1, 16], [by_rows[1], by_rows[16]])
    ops = FusedOps(few_rows=products)

    def compute(x: Tensor, pause: Callable[[], object]) -> Tensor:
        residual = x.clone()
        for norm, first, gate_up, down in layers:
            hidden = ops.linear(residual, first, None, (norm, 1e-5))
            pause()
            hidden = ops.add_norm(hidden, None, norm, 1e-5)[0]
            pause()
            hidden = ops.gated_linear(hidden, gate_up, None, "silu")
            pause()
            ops.add_linear(residual, hidden, down, None)
            pause()
        return residual

    for num_rows in (1, 7):
        inputs = normal(generator, num_rows, 2048)
        compute(inputs, torch.cuda.synchronize)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = compute(inputs, lambda: None)
        for _ in range(20):
            inputs.copy_(normal(generator, num_rows, 2048))
            expected = compute(inputs, torch.cuda.synchronize)
            graph.replay()
            assert torch.equal(output, expected)


def test_the_fastest_tile_is_found() -> None:
    generator = torch.Generator(DEVICE).manual_seed(0)
    weights = [normal(generator, 4096, 2048) for _ in range(4)]

    def compute_slowly(x: Tensor, weight: Tensor, output: Tensor) -> None:
        torch.cuda._sleep(10_000_000)  # type: ignore[no-untyped-call]
        torch.mm(x, weight.T, out=output)

    choice = FewRowsChoice(FewRowsProducts(FETCHED, 800), weights, STORE, SIZES, compute_slowly)
    answer = choice.measure()
    assert None not in answer
    assert choice.admits(answer)


@pytest.mark.parametrize(("shape", "most"), [("llama", 0), ("qwen2", 0), ("qwen3", 1)])
def test_an_engine_that_uses_it_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str, most: int
) -> None:
    """In graphs and in steps with prompts, with a bias and without. most: rows whose products threads compute."""
    used = list[FewRowsTile]()

    def choose_ours(choice: FewRowsChoice) -> list[FewRowsTile | None]:
        answer: list[FewRowsTile | None] = []
        for operands in choice._make_operands():
            tiles = [tile for tile in TILES if choice._is_built(tile, *operands)]
            tiles.sort(key=lambda tile: tile.rows, reverse=most < len(operands[0]))
            used.extend(tiles[:1])
            answer.append(tiles[0] if tiles else None)
        return answer

    monkeypatch.setattr(FewRowsChoice, "measure", choose_ours)
    reference = Reference.of(make_model(tmp_path, shape))
    engine = WatchedEngine(reference.folder, "bfloat16", grouped=False)
    samples = alone(engine)
    one = engine.run([[5, 6, 7]], sampling=LOGPROBS, max_tokens=NUM_TOKENS)[0]
    errors = Errors.of(reference, [*samples, ([5, 6, 7], one.samples[0])])
    check(Case("bfloat16", "auto", graphs=True), errors)
    assert {tile.rows for tile in used} == ({1, 16} if most else {16})
    assert engine.watch.num_replays > NUM_TOKENS


def test_the_benchmark_times_every_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "products", "--rows", "1,16", "model.dtype=bfloat16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.endswith("cuBLASLt") for line in lines) == 2 * 5
