"""Which matrices are tuned, and for how many rows."""

from __future__ import annotations

from itertools import pairwise

import pytest

pytest.importorskip("triton")

from toka_async.runner.products import gated_sizes


@pytest.mark.parametrize("most", [1, 100, 128, 129, 2048, 10_000])
def test_gated_products_are_tuned_up_to_the_largest_step(most: int) -> None:
    sizes = gated_sizes(most)
    assert sizes[-1] == most
    assert sizes[0] == min(128, most)
    assert all(low < high <= 2 * low for low, high in pairwise(sizes))
