from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources

from toka_async.kernels.few_rows import ADD, STORE, FewRowsProducts, FewRowsTile
from toka_async.model.matrices.ops import TorchOps
from toka_async.tuning.few_rows import FewRowsChoice, list_few_rows_sizes

ONE = FewRowsTile(rows=1, columns=4, depth=16, num_stages=1, num_warps=4)
MANY = FewRowsTile(rows=16, columns=8, depth=16, num_stages=2, num_warps=4)
WIDE = FewRowsTile(rows=16, columns=32, depth=16, num_stages=2, num_warps=4)  # for no matrix here
Sizes = list[FewRowsTile | None]


class Clock:
    """Each call takes what `takes` says of the number of rows, the usual way always 10."""

    def __init__(self, takes: dict[int, float]) -> None:
        self.takes = takes
        self.usual: list[int] = []
        self.num_usual = 0

    def compute_usually(self, x: Tensor, weight: Tensor, output: Tensor) -> None:
        assert output.shape == (len(x), len(weight))
        self.usual.append(len(x))

    def __call__(self, call: Callable[[], None], num_calls: int) -> float:
        self.usual.clear()
        call()
        x: Tensor = call.args[-2]  # type: ignore[attr-defined]
        return num_calls * (10.0 if self.usual else self.takes[len(x)])


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(torch.float16)


def choice_of(
    clock: Clock, finish: str = STORE, sizes: Sequence[int] = (1, 4), tiles: Sequence[FewRowsTile] = (ONE, MANY, WIDE)
) -> tuple[FewRowsChoice, FewRowsProducts]:
    products = FewRowsProducts(0, 1)
    weights = [normal(16, 32), normal(16, 32) + 1]
    return FewRowsChoice(products, weights, finish, sizes, clock.compute_usually, 13, None, tiles, clock), products


def test_each_size_has_the_fastest_way() -> None:
    choice, products = choice_of(Clock({1: 5.0, 4: 12.0}))
    assert choice.measure() in ([ONE, None], [MANY, None])
    choice, products = choice_of(Clock({1: 12.0, 4: 9.0}))
    answer: Sizes = choice.measure()
    assert answer == [None, MANY]
    choice.use(answer)
    weight = normal(16, 32)
    assert products.compute(STORE, normal(1, 32), weight) is None
    output = products.compute(STORE, normal(3, 32), weight)
    assert output is not None
    exact = TorchOps().linear(normal(3, 32).float(), weight.float())
    torch.testing.assert_close(output.float(), exact, atol=4e-2, rtol=4e-3)


def test_products_that_are_added_have_a_choice_of_their_own() -> None:
    choice, products = choice_of(Clock({1: 5.0, 4: 5.0}), ADD)
    choice.use(choice.measure())
    weight, residual = normal(16, 32), normal(4, 16)
    assert products.compute(STORE, normal(4, 32), weight) is None
    assert products.compute(ADD, normal(4, 32), weight, output=residual) is residual


def test_an_answer_from_a_file_must_suit(monkeypatch: pytest.MonkeyPatch) -> None:
    choice, _ = choice_of(Clock({}))
    assert choice.admits([ONE, MANY])
    assert choice.admits([None, None])
    assert not choice.admits([ONE])  # of other sizes
    assert not choice.admits([None, ONE])  # of one row, for four
    assert not choice.admits([WIDE, None])
    assert not choice_of(Clock({}), tiles=[MANY])[0].admits([ONE, MANY])  # that is no longer there

    def fail(*_: Any, **__: Any) -> None:
        raise OutOfResources(120_000, 101_376, "shared memory")

    monkeypatch.setattr(FewRowsProducts, "run", fail)
    assert not choice.admits([ONE, None])
    assert choice.admits([None, None])


def test_what_cannot_be_built_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    run = FewRowsProducts.run

    def fail(products: FewRowsProducts, finish: str, tile: FewRowsTile, *args: Any, **options: Any) -> None:
        if tile == MANY:
            raise OutOfResources(120_000, 101_376, "shared memory")
        run(products, finish, tile, *args, **options)

    monkeypatch.setattr(FewRowsProducts, "run", fail)
    assert choice_of(Clock({1: 5.0, 4: 5.0}))[0].measure() == [ONE, None]


def test_what_the_fastest_tiles_depend_on() -> None:
    assert choice_of(Clock({}), sizes=[4, 1], tiles=[ONE])[0].describe() == {
        "shape": [16, 32],
        "dtype": "torch.float16",
        "weights": 2,
        "sizes": [1, 4],
        "finish": STORE,
        "library": 13,
        "norm": None,
        "bias": False,
        "tiles": [repr(ONE)],
    }


@pytest.mark.parametrize(("most", "sizes"), [(1, [1]), (5, [1, 2, 4]), (300, [1, 2, 4, 8, 16])], ids=str)
def test_sizes(most: int, sizes: list[int]) -> None:
    assert list_few_rows_sizes(most) == sizes


def test_builds_are_of_tiles_that_fit() -> None:
    """One each, as any number of rows has the same kernel."""
    choice, _ = choice_of(Clock({}))
    builds = choice.list_builds()
    assert len(builds) == 2
    for build in builds:
        build()
