from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toka_async.arrays import Int32
from toka_async.server.generate.json_numbers import LARGEST, decimals, integers
from toka_async.text.byte_table import PAD, Bytes


def written(rows: Bytes, lengths: Int32) -> list[str]:
    """Each number as it is in JSON, once the padding is taken out."""
    texts = [row.tobytes().translate(None, bytes([PAD])).decode() for row in rows]
    assert [len(text) for text in texts] == lengths.tolist()
    return texts


@given(st.lists(st.floats(-LARGEST, LARGEST, width=32), max_size=8))
def test_decimals(values: list[float]) -> None:
    column = np.array(values, np.float32)
    texts = written(*decimals(column))
    assert [json.loads(text) for text in texts] == pytest.approx(column.tolist(), abs=1e-7, rel=1e-7)
    assert all(len(text.partition(".")[2]) == 7 for text in texts)


def test_what_is_not_in_range() -> None:
    values = np.array([-np.inf, np.inf, np.nan, -1e30, -0.0, -1e-9], np.float32)
    texts = written(*decimals(values))
    assert texts == ["-9999.0000000", "9999.0000000", "-9999.0000000", "-9999.0000000", "0.0000000", "0.0000000"]


@given(st.lists(st.integers(0, 10**8 - 1) | st.sampled_from([0, 9, 10, 9999, 10000, 10001, 99999]), max_size=8))
def test_integers(values: list[int]) -> None:
    assert written(*integers(np.array(values, np.int64))) == [str(value) for value in values]
