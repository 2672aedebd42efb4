from __future__ import annotations

import numpy as np
import pytest

from tests.cases.columns import ids
from toka_async.arrays import column
from toka_async.messages import StopMask
from toka_async.scheduler.stop_masks import StopTable


def mask(stop_id: int, tokens: list[int], window: int = 4) -> StopMask:
    values = np.zeros(10, np.bool_)
    values[tokens] = True
    return StopMask(stop_id=stop_id, mask=column(values), window=window)


def test_hits_are_tokens_of_the_rows_own_set() -> None:
    table = StopTable(10)
    for stop_id in range(5):
        table.add(mask(stop_id, [stop_id], window=stop_id + 2))
    rows = ids(table.row(0), table.row(3), table.row(-1), table.row(4))
    assert table.find_hits(rows, ids(0, 3, 0, 3)).tolist() == [True, True, False, False]
    assert [table.window(table.row(i)) for i in range(5)] == [2, 3, 4, 5, 6]


def test_a_dropped_row_is_used_again_without_its_tokens() -> None:
    table = StopTable(10)
    table.add(mask(0, [1, 2, 3]))
    row = table.row(0)
    table.drop(0)
    table.drop(0)
    with pytest.raises(KeyError):
        table.row(0)
    table.add(mask(9, [5]))
    assert table.row(9) == row
    assert table.find_hits(np.full(4, row, np.int32), ids(1, 2, 3, 5)).tolist() == [False, False, False, True]


def test_a_set_sent_again_replaces_the_first() -> None:
    table = StopTable(10)
    table.add(mask(4, [1]))
    row = table.row(4)
    table.add(mask(4, [2], window=9))
    assert table.row(4) == row
    assert table.find_hits(ids(row, row), ids(1, 2)).tolist() == [False, True]
    assert table.window(row) == 9
