from __future__ import annotations

import pytest

from toka_async.kernels.launches.sizes import divide_up, round_to_power


@pytest.mark.parametrize(("count", "size", "expected"), [(0, 16, 0), (1, 16, 1), (16, 16, 1), (17, 16, 2)])
def test_the_last_part_may_be_smaller(count: int, size: int, expected: int) -> None:
    assert divide_up(count, size) == expected


@pytest.mark.parametrize(("count", "expected"), [(1, 1), (2, 2), (3, 4), (64, 64), (65, 128)])
def test_powers_of_two(count: int, expected: int) -> None:
    assert round_to_power(count) == expected
