from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from toka_async.tuning.trial import Way, find_fastest, pick_rows_to_time


class Timed:
    """Ways that take what a test says, and remember what they were given."""

    def __init__(self, *costs: Callable[[int], float]) -> None:
        self.costs = costs
        self.calls: list[tuple[int, Tensor, Tensor]] = []

    def ways(self) -> list[Way]:
        def way(index: int) -> Way:
            return lambda x, weight, _: self.calls.append((index, x, weight))

        return [way(index) for index in range(len(self.costs))]

    def clock(self, call: Callable[[], None], num_calls: int) -> float:
        first = len(self.calls)
        for _ in range(num_calls):
            call()
        return sum(self.costs[index](len(x)) for index, x, _ in self.calls[first:])


def chosen(timed: Timed, *num_rows: int) -> int:
    operands = [(torch.empty(num, 2), torch.empty(num, 3)) for num in num_rows]
    return find_fastest(timed.ways(), [torch.empty(3, 2)], operands, timed.clock)


def test_the_fastest_of_all_rows_together() -> None:
    timed = Timed(lambda _: 9, lambda _: 5, lambda m: 4 if m == 8 else 7)
    assert chosen(timed, 8) == 2
    assert chosen(timed, 8, 4) == 1


@pytest.mark.parametrize("cost", [9.9, 11.0])
def test_the_usual_way_unless_another_is_clearly_faster(cost: float) -> None:
    assert chosen(Timed(lambda _: 10, lambda _: cost), 4) == 0


def test_there_may_be_no_other_way() -> None:
    timed = Timed(lambda _: 10)
    assert chosen(timed, 4) == 0
    assert not timed.calls


def test_weights_are_used_in_turn() -> None:
    timed, weights = Timed(lambda _: 0.1, lambda _: 0.05), [torch.empty(3, 2) for _ in range(3)]
    find_fastest(timed.ways(), weights, [(torch.empty(4, 2), torch.empty(4, 3))], timed.clock)
    used = [id(weight) for index, _, weight in timed.calls if index == 1]
    assert used[:5] == [id(weights[0]), id(weights[0]), id(weights[1]), id(weights[2]), id(weights[0])]


@pytest.mark.parametrize(("cost", "num_calls"), [(0.01, 8), (0.2, 3), (0.9, 1), (1.5, 8), (6.0, 2), (30.0, 1)])
def test_turns_of_long_products_last(cost: float, num_calls: int) -> None:
    """Three of each; before them, each way was called once."""
    timed = Timed(lambda _: cost, lambda _: cost)
    chosen(timed, 4)
    assert len(timed.calls) == 2 + 2 * 3 * num_calls
    timed.calls.clear()
    find_fastest(timed.ways(), [torch.empty(3, 2)], [(torch.empty(4, 2), torch.empty(4, 3))], timed.clock, sustained=60)
    assert len(timed.calls) == 2 + 2 * 3 * (num_calls if cost < 1 else math.ceil(60 / cost))


def test_how_much_faster_another_must_be() -> None:
    timed, operands = Timed(lambda _: 10, lambda _: 9.9), [(torch.empty(4, 2), torch.empty(4, 3))]
    assert find_fastest(timed.ways(), [torch.empty(3, 2)], operands, timed.clock, gain=1.0) == 1
    assert find_fastest(timed.ways(), [torch.empty(3, 2)], operands, timed.clock, gain=0.99) == 0


def test_far_sizes_are_timed_in_the_middle_too() -> None:
    assert pick_rows_to_time(100, 64) == [100]
    assert pick_rows_to_time(1024, 512) == [1024, 768]
    assert pick_rows_to_time(16384, 12288) == [16384]  # alike
