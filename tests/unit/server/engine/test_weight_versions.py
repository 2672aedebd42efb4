from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from toka_async.server.engine.weight_versions import WeightVersions, list_spans


def test_a_name_keeps_its_number() -> None:
    versions = WeightVersions()
    assert versions.number_all(["default"]) == [0]
    assert versions.number_all(["b", "a", "b"]) == [1, 2, 1]
    assert versions.names == ["default", "b", "a"]


@given(st.lists(st.integers(0, 3), max_size=30))
def test_spans_cover_every_token_once(numbers: list[int]) -> None:
    spans = list_spans(np.asarray(numbers, np.int32))
    assert [number for start, end, number in spans for _ in range(start, end)] == numbers
    assert [start for start, _, _ in spans] == [0, *(end for _, end, _ in spans)][: len(spans)]
    assert all(before[2] != after[2] for before, after in pairwise(spans))
