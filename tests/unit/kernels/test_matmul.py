"""The choice between algorithms, over a library that computes with torch and takes the time that a test says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from toka_async.kernels import matmul
from toka_async.kernels.cublaslt import Algorithm, Product
from toka_async.kernels.fused import FusedOps
from toka_async.kernels.matmul import TunedProducts

N, K = 64, 32


@pytest.fixture(autouse=True)
def aligned_as_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "ALIGNMENT", 16)


class Library:
    """Algorithms are names with a cost for each number of rows; torch, which it does not run, costs 10."""

    def __init__(self, costs: dict[str, Callable[[int], float]]) -> None:
        self.costs = costs
        self.refused: set[str] = set()
        self.time = 0.0
        self.ran: list[tuple[str, int]] = []
        self.version = 13

    def save(self, algorithm: Algorithm) -> list[int]:
        return [*str(algorithm).encode()]

    def restore(self, saved: Sequence[int]) -> Algorithm:
        if not saved:
            raise ValueError("no algorithm's")
        return Algorithm(bytes(saved).decode())

    def algorithms(self, product: Product, m: int) -> list[Algorithm]:  # noqa: ARG002
        return [Algorithm(name) for name in self.costs]

    def run(self, product: Product, algorithm: Algorithm, x: Tensor, weight: Tensor, output: Tensor) -> bool:
        name = str(algorithm)
        if name in self.refused:
            return False
        self.ran.append((name, len(x)))
        self.time += self.costs[name](len(x))
        result = x @ weight.T
        output.copy_(output + result if product.adds else result)
        return True

    def is_rested(self, name: str) -> bool:
        """It did not run just before the run that has begun."""
        return len(self.ran) < 2 or self.ran[-2][0] != name

    def clock(self, call: Callable[[], None], num_calls: int) -> float:
        begin = self.time
        for _ in range(num_calls):
            before = self.time
            call()
            self.time += 10 if self.time == before else 0
        return self.time - begin


def weight() -> Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(1))


def tuned(library: Library, adds: bool = False, sizes: tuple[int, ...] = (2, 8)) -> TunedProducts:
    products = TunedProducts(library, library.clock)
    products.tune([weight(), weight()], adds, sizes)
    library.ran.clear()
    return products


@pytest.mark.parametrize("num_rows", [1, 2, 3, 8])
def test_the_fastest_computes_up_to_its_number_of_rows(num_rows: int) -> None:
    library = Library({"first": lambda _: 9, "few": lambda m: 4 if m <= 2 else 20, "many": lambda m: 30 - 3 * m})
    x = torch.randn(num_rows, K)
    torch.testing.assert_close(tuned(library).linear(x, weight()), x @ weight().T)
    assert library.ran == [("few" if num_rows <= 2 else "many", num_rows)]


def test_a_choice_holds_for_the_rows_since_the_size_before() -> None:
    """At 400 rows one is faster, in the middle between 100 and 400 it is slower by more."""
    library = Library({"steady": lambda _: 5, "last": lambda m: 4 if m == 400 else 7})
    products = tuned(library, sizes=(100, 400))
    products.linear(torch.randn(300, K), weight())
    assert library.ran == [("steady", 300)]


@pytest.mark.parametrize("costs", [{"alike": lambda _: 9.9}, {"slower": lambda _: 11}, {}])
def test_torch_computes_unless_another_is_clearly_faster(costs: dict[str, Callable[[int], float]]) -> None:
    library, x = Library(costs), torch.randn(3, K)
    torch.testing.assert_close(tuned(library).linear(x, weight()), x @ weight().T)
    assert not library.ran


def test_long_products_are_timed_until_the_chip_slows_down() -> None:
    """One of them is the fastest, once."""
    library = Library({"steady": lambda _: 5, "soon tired": lambda _: 4 if library.is_rested("soon tired") else 7})
    products = tuned(library)
    products.linear(torch.randn(3, K), weight())
    assert library.ran == [("steady", 3)]


def test_what_does_not_run_is_not_chosen() -> None:
    library = Library({"broken": lambda _: 1, "works": lambda _: 5})
    library.refused = {"broken"}
    tuned(library).linear(torch.randn(3, K), weight())
    assert library.ran == [("works", 3)]


@pytest.mark.parametrize("adds", [False, True])
def test_torch_computes_what_was_not_tuned_or_fails_later(adds: bool) -> None:
    library = Library({"fast": lambda _: 1})
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
    library, x, residual = Library({"fast": lambda _: 1}), torch.randn(3, K), torch.randn(3, N)
    expected = residual + x @ weight().T
    ops = FusedOps(tuned(library, adds=True))
    rest, total = ops.add_linear(residual, x, weight(), None)
    assert rest is None
    assert total is residual
    torch.testing.assert_close(residual, expected)
    assert library.ran == [("fast", 3)]


def test_products_with_a_bias_are_torchs() -> None:
    library, x, bias = Library({"fast": lambda _: 1}), torch.randn(3, K), torch.randn(N)
    ops = FusedOps(tuned(library))
    torch.testing.assert_close(ops.linear(x, weight(), bias), x @ weight().T + bias)
    rest, total = ops.add_linear(torch.zeros(3, N), x, weight(), bias)
    assert rest is not None
    torch.testing.assert_close(rest + total, x @ weight().T + bias)
    assert not library.ran


def test_another_process_adopts_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    by_torch: list[int] = []
    monkeypatch.setattr(matmul, "_by_torch", lambda _, x, *__: by_torch.append(len(x)))
    costs: dict[str, Callable[[int], float]] = {"few": lambda m: 4 if m <= 2 else 20}
    chosen = tuned(Library(costs)).chosen(weight(), False)
    assert chosen == [[*b"few"], None]
    library = Library(costs)
    products = TunedProducts(library, library.clock)
    assert products.adopt(weight(), False, [8, 2], chosen)
    assert library.ran == [("few", 2)]  # so that nothing is loaded later,
    assert by_torch[-1] == 8  # nor of torch
    for num_rows in (1, 2, 3):
        x = torch.randn(num_rows, K)
        torch.testing.assert_close(products.linear(x, weight()), x @ weight().T)
    assert library.ran[1:] == [("few", 1), ("few", 2)]
    assert products.chosen(weight(), False) == chosen


@pytest.mark.parametrize("chosen", [[[*b"few"]], [[*b"few"], [*b"broken"]], [None, []]])
def test_what_does_not_compute_here_is_not_adopted(chosen: list[list[int] | None]) -> None:
    library = Library({"few": lambda _: 4, "broken": lambda _: 1})
    library.refused = {"broken"}
    products = tuned(library)
    assert not products.adopt(weight(), False, [2, 8], chosen)
    assert products.chosen(weight(), False) == [[*b"few"]] * 2
