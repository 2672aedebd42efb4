from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.fakes.cublaslt import FakeLibrary
from toka_async.checkpoint.matrix_spec import MatrixSpec, Units
from toka_async.kernels.few_rows import FewRowsProducts
from toka_async.kernels.fp8 import products as products_module
from toka_async.kernels.fp8.ops import ScaledKernels
from toka_async.kernels.fp8.products import ScaledProducts
from toka_async.kernels.fused import FusedOps
from toka_async.kernels.gated import GatedProducts, Tile
from toka_async.model.matrices.fp8 import Fp8Matrix
from toka_async.model.matrices.matrix import MatrixUse
from toka_async.model.matrices.ops import TorchOps
from toka_async.model.matrices.share import whole_of
from toka_async.tuning.few_rows import FewRowsChoice
from toka_async.tuning.fp8 import ScaledAlgorithmChoice, ScaledTileChoice, list_fp8_choices
from toka_async.tuning.matrix_group import MatrixGroup, RowCounts

N, K = 256, 128


@pytest.fixture(autouse=True)
def aligned_as_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products_module, "ALIGNMENT", 16)


def make(kind: str, ops: Any = None, bias: bool = False) -> Fp8Matrix:
    spec = MatrixSpec(names=("it",), outputs=(Units(N),), inputs=Units(K), split="inputs", bias=bias, format=kind)
    matrix = Fp8Matrix(spec, [whole_of(N)], whole_of(K), ops or TorchOps())
    for _, part in matrix.parts():
        part.write(torch.randn(part.shape, generator=torch.Generator().manual_seed(1)))
    return matrix


def make_ops(library: FakeLibrary | None = None, gates: bool = True) -> tuple[FusedOps, ScaledKernels]:
    kernels = ScaledKernels(
        ScaledProducts(library), GatedProducts(2, 1) if gates else None, FewRowsProducts(1 << 20, 8)
    )
    return FusedOps(scaled=kernels), kernels


def list_names(ops: FusedOps, use: MatrixUse, counts: RowCounts) -> list[str]:
    return [choice.name for choice in list_fp8_choices(ops, MatrixGroup(use, [use.matrix]), counts)]


def test_what_is_chosen_goes_by_use() -> None:
    matrix, counts = make("fp8/block"), RowCounts(100, (1, 2, 4))
    ops, _ = make_ops(FakeLibrary({}))
    product, gated, few = "scaled-product", "scaled-gated-product", "few-rows"
    assert list_names(ops, MatrixUse(matrix), counts) == [product, few]
    assert list_names(ops, MatrixUse(matrix, "silu", normed=torch.bfloat16), counts) == [product, gated, few]
    assert list_names(ops, MatrixUse(matrix, "silu"), RowCounts(64, exact=(64,))) == [product, gated]
    assert list_names(ops, MatrixUse(make("fp8/block", bias=True), "silu"), counts) == [product, few]
    assert list_names(make_ops(gates=False)[0], MatrixUse(matrix, "silu"), counts) == [few]
    assert list_names(FusedOps(), MatrixUse(matrix), counts) == []


@pytest.mark.parametrize("kind", ["fp8/channel", "fp8/block"])
@pytest.mark.parametrize("adds", [False, True])
def test_the_fastest_algorithm_computes(kind: str, adds: bool) -> None:
    library = FakeLibrary({"fast": lambda _: 4.0, "slow": lambda _: 9.0})
    ops, kernels = make_ops(library)
    matrix, exact = make(kind, ops), make(kind)
    choice = ScaledAlgorithmChoice(kernels.products, [matrix.scaled], torch.float32, adds, [3, 6], library.clock)
    answer = choice.measure()
    assert answer == [[*b"fast"], [*b"fast"]]
    assert choice.admits(answer)
    assert not choice.admits(answer[:1])
    choice.use(answer)
    library.ran.clear()
    x = torch.randn(6, K)
    if adds:
        added, residual = matrix.add(torch.zeros(6, N), matrix.take(x))
        output = residual if added is None else residual + added
    else:
        output = matrix.product(matrix.take(x))
    assert library.ran == [("fast", 8 if kind == "fp8/block" else 6)]
    assert (output - exact.product(exact.take(x))).abs().max() < 0.1 * output.abs().max()
    assert choice.describe()["scaling"] == kind[4:]


def test_our_kernel_stays_where_the_library_is_slower() -> None:
    library = FakeLibrary({"slow": lambda _: 11.0})
    _, kernels = make_ops(library)
    choice = ScaledAlgorithmChoice(
        kernels.products, [make("fp8/channel").scaled], torch.float32, False, [3], library.clock
    )
    assert choice.measure() == [None]
    assert choice.admits([None])


@pytest.mark.parametrize("kind", ["fp8/channel", "fp8/block"])
def test_gated_tiles_are_chosen_for_quantized_rows(kind: str) -> None:
    ops, kernels = make_ops()
    matrix, tile = make(kind, ops), Tile(rows=16, columns=32, depth=128, num_stages=2, num_warps=4)
    times = iter([2.0, 1.0] * 100)

    def clock(call: Callable[[], None], num_calls: int) -> float:
        call()
        return num_calls * next(times)

    choice = ScaledTileChoice(kernels, [matrix.scaled], torch.bfloat16, "silu", [2], tiles=[tile], clock=clock)
    assert choice.is_open
    answer = choice.measure()
    assert len(answer) == 1
    assert choice.admits([tile])
    choice.use([tile])
    assert kernels.gates is not None
    assert kernels.gates.ranges() == [(1, 2)]
    assert choice.describe()["by_block"] == (kind == "fp8/block")


def test_few_rows_are_chosen_for_rows_as_they_are() -> None:
    ops, kernels = make_ops()
    use = MatrixUse(make("fp8/channel", ops), normed=torch.bfloat16)
    *_, choice = list_fp8_choices(ops, MatrixGroup(use, [use.matrix]), RowCounts(2))
    assert isinstance(choice, FewRowsChoice)
    facts = choice.describe()
    assert facts["dtype"] == "torch.float8_e4m3fn"
    choice._clock = lambda call, _: call() or 1.0  # type: ignore[func-returns-value]
    assert choice.measure() == [None, None]
    del kernels
