"""Which matrices are tuned, and for how many rows."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from toka_async.runner.products import gated_sizes


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, [1]), (128, [128]), (300, [128, 256, 300]), (9000, [128, 256, 512, 1024, 9000])], ids=str
)
def test_gated_products_are_tuned_up_to_the_largest_step(most: int, sizes: list[int]) -> None:
    assert gated_sizes(most) == sizes
