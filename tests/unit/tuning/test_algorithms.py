"""The choice between algorithms, over a library that computes with torch and takes the time that a test says."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.fakes.cublaslt import FakeLibrary
from toka_async.kernels import matmul
from toka_async.kernels.matmul import TunedProducts
from toka_async.tuning.algorithms import AlgorithmChoice, list_product_sizes

N, K = 64, 32


@pytest.fixture(autouse=True)
def aligned_as_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "ALIGNMENT", 16)


def weight() -> Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(1))


def choice_of(
    library: FakeLibrary, adds: bool = False, sizes: tuple[int, ...] = (2, 8)
) -> tuple[AlgorithmChoice, TunedProducts]:
    products = TunedProducts(library)
    return AlgorithmChoice(products, [weight(), weight()], adds, sizes, library.clock), products


def tuned(library: FakeLibrary, adds: bool = False, sizes: tuple[int, ...] = (2, 8)) -> TunedProducts:
    choice, products = choice_of(library, adds, sizes)
    choice.use(choice.measure())
    library.ran.clear()
    return products


@pytest.mark.parametrize("num_rows", [1, 2, 3, 8])
def test_the_fastest_computes_up_to_its_number_of_rows(num_rows: int) -> None:
    library = FakeLibrary({"first": lambda _: 9, "few": lambda m: 4 if m <= 2 else 20, "many": lambda m: 30 - 3 * m})
    x = torch.randn(num_rows, K)
    torch.testing.assert_close(tuned(library).linear(x, weight()), x @ weight().T)
    assert library.ran == [("few" if num_rows <= 2 else "many", num_rows)]


def test_a_choice_holds_for_the_rows_since_the_size_before() -> None:
    """At 400 rows one is faster, in the middle between 100 and 400 it is slower by more."""
    library = FakeLibrary({"steady": lambda _: 5, "last": lambda m: 4 if m == 400 else 7})
    products = tuned(library, sizes=(100, 400))
    products.linear(torch.randn(300, K), weight())
    assert library.ran == [("steady", 300)]


@pytest.mark.parametrize("costs", [{"alike": lambda _: 9.9}, {"slower": lambda _: 11}, {}])
def test_torch_computes_unless_another_is_clearly_faster(costs: dict[str, Callable[[int], float]]) -> None:
    library, x = FakeLibrary(costs), torch.randn(3, K)
    torch.testing.assert_close(tuned(library).linear(x, weight()), x @ weight().T)
    assert not library.ran


def test_long_products_are_timed_until_the_chip_slows_down() -> None:
    """One of them is the fastest, once."""
    library = FakeLibrary({"steady": lambda _: 5, "soon tired": lambda _: 4 if library.is_rested("soon tired") else 7})
    products = tuned(library)
    products.linear(torch.randn(3, K), weight())
    assert library.ran == [("steady", 3)]


def test_what_does_not_run_is_not_chosen() -> None:
    library = FakeLibrary({"broken": lambda _: 1, "works": lambda _: 5})
    library.refused = {"broken"}
    tuned(library).linear(torch.randn(3, K), weight())
    assert library.ran == [("works", 3)]


def test_another_process_takes_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    by_torch: list[int] = []
    monkeypatch.setattr(AlgorithmChoice, "_compute_usually", lambda _, x, *__: by_torch.append(len(x)))
    costs: dict[str, Callable[[int], float]] = {"few": lambda m: 4 if m <= 2 else 20}
    chosen = choice_of(FakeLibrary(costs))[0].measure()
    assert chosen == [[*b"few"], None]
    library = FakeLibrary(costs)
    choice, products = choice_of(library, sizes=(8, 2))
    assert choice.admits(chosen)
    assert library.ran == [("few", 2)]  # so that nothing is loaded later,
    assert by_torch[-1] == 8  # nor of torch
    choice.use(chosen)
    for num_rows in (1, 2, 3):
        x = torch.randn(num_rows, K)
        torch.testing.assert_close(products.linear(x, weight()), x @ weight().T)
    assert library.ran[1:] == [("few", 1), ("few", 2)]


@pytest.mark.parametrize("chosen", [[[*b"few"]], [[*b"few"], [*b"broken"]], [None, []]])
def test_what_does_not_compute_here_is_not_admitted(chosen: list[list[int] | None]) -> None:
    library = FakeLibrary({"few": lambda _: 4, "broken": lambda _: 1})
    library.refused = {"broken"}
    assert not choice_of(library)[0].admits(chosen)


def test_what_the_fastest_algorithms_depend_on() -> None:
    """How many weights are used in turn is one of it."""
    assert choice_of(FakeLibrary({}), adds=True, sizes=(8, 2))[0].describe() == {
        "shape": [N, K],
        "dtype": "torch.float32",
        "weights": 2,
        "sizes": [2, 8],
        "adds": True,
        "library": 13,
    }


@pytest.mark.parametrize("most", [1, 4, 5, 512, 8192, 10_000, 32_768])
def test_sizes_are_those_of_graphs_and_then_not_far_apart(most: int) -> None:
    graphs = [1, 2, 4, 8, 64, 512]
    sizes = list_product_sizes(graphs, most)
    assert sizes[-1] == most
    usual = [size for size in graphs if size <= most]
    assert sizes[: len(usual)] == usual
    assert all(low < high <= 2 * low for low, high in pairwise(size for size in sizes if size >= 512))
    assert list_product_sizes([], 40)[:4] == [1, 2, 3, 4]


def test_without_proposals_torch_computes() -> None:
    choice, products = choice_of(FakeLibrary({}))
    answer = choice.measure()
    assert answer == [None, None]
    assert choice.admits(answer)
    choice.use(answer)
    x = torch.randn(3, K)
    torch.testing.assert_close(products.linear(x, weight()), x @ weight().T)
