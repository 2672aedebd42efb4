from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toka_async.arrays import EMPTY, Int32, as_bool, as_f32, as_i32, as_i64, column, f32_column, i32_column, next_rows

SLOTS = st.lists(st.integers(0, 30), unique=True)


def ids(values: list[int]) -> Int32:
    return np.asarray(values, dtype=np.int32)


@given(rows=SLOTS, freed=SLOTS, joining=SLOTS)
def test_next_rows_equals_lists(rows: list[int], freed: list[int], joining: list[int]) -> None:
    stay = [slot for slot in rows if slot not in freed]
    joined = [slot for slot in joining if slot not in stay]
    result = next_rows(ids(rows), ids(freed), ids(joined))
    assert result.tolist() == stay + joined
    assert result.dtype == np.int32


def test_a_slot_that_is_freed_and_joins_goes_to_the_end() -> None:
    assert next_rows(ids([1, 2, 3]), ids([1]), ids([1])).tolist() == [2, 3, 1]


@pytest.mark.parametrize(
    ("values", "read"),
    [
        (np.asarray([1, -2, 2**31 - 1], np.int32), as_i32),
        (np.asarray([1, -(2**63)], np.int64), as_i64),
        (np.asarray([0.5, -np.inf], np.float32), as_f32),
        (np.asarray([True, False]), as_bool),
        (np.zeros((0,), np.int32), as_i32),
    ],
)
def test_a_column_reads_back(values: npt.NDArray[np.generic], read: object) -> None:
    assert callable(read)
    back = read(column(values))
    assert back.dtype == values.dtype
    assert back.tolist() == values.tolist()


def test_a_column_is_a_view_of_its_array() -> None:
    values = np.zeros(3, np.int32)
    field = column(values)
    values[1] = 7
    assert as_i32(field).tolist() == [0, 7, 0]
    assert field.nbytes == 12


def test_a_column_of_an_array_with_gaps_has_its_values() -> None:
    values = np.arange(10, dtype=np.int32)[::3]
    assert as_i32(column(values)).tolist() == [0, 3, 6, 9]
    table = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert as_f32(column(table)).tolist() == [0, 1, 2, 3, 4, 5]
    assert as_f32(column(table.T)).tolist() == [0, 3, 1, 4, 2, 5]


def test_a_read_column_of_bytes_is_read_only() -> None:
    with pytest.raises(ValueError, match="read-only"):
        as_i32(memoryview(b"\0\0\0\0"))[0] = 1


def test_columns_of_any_numbers_have_the_named_type() -> None:
    assert as_i32(i32_column([1, 2])).tolist() == [1, 2]
    assert as_i32(i32_column(i for i in range(3))).tolist() == [0, 1, 2]
    assert as_i32(i32_column(np.asarray([5, 6], np.int64))).tolist() == [5, 6]
    assert as_f32(f32_column([0.5])).tolist() == [0.5]
    assert as_f32(f32_column(np.asarray([0.25], np.float64))).tolist() == [0.25]
    assert i32_column([]) == f32_column([]) == EMPTY


def test_a_number_too_large_for_a_column_is_an_error() -> None:
    with pytest.raises(OverflowError):
        i32_column([2**31])
