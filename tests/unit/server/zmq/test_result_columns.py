"""Columns of results."""

from __future__ import annotations

import numpy as np

from toka_async.messages import Reason
from toka_async.server.engine.token_block import TokenRows
from toka_async.server.zmq.result_columns import SampleColumns, chosen

NAMES = ["default", "step-1"]


def rows(*ids: int) -> TokenRows:
    values = np.asarray(ids, np.int32)
    tops = np.stack([values, values + 1], axis=1)
    return TokenRows(values, -values.astype(np.float32), tops, -tops.astype(np.float32))


def test_samples_and_a_part_of_them() -> None:
    made = SampleColumns(9, 16, 2, NAMES, text=True, stops=True)
    made.add(0, rows(1, 2), "é", Reason.LENGTH, -1)
    made.add(1, rows(), "", Reason.STOP, -1)
    made.add(2, rows(3, 4, 5), "abc", Reason.STOP_STRING, 1)
    header, columns = made.columns()
    assert header.num_top == 2
    assert header.columns == tuple(columns)
    lists = {name: values.tolist() for name, values in columns.items()}
    assert lists["ids"] == [9, 9, 9]
    assert lists["counts"] == [2, 0, 3]
    assert lists["cached"] == [16] * 3
    assert lists["stops"] == [-1, -1, 1]
    assert lists["text_lengths"] == [2, 0, 3]
    last = {name: values.tolist() for name, values in chosen(columns, np.asarray([False, True, True])).items()}
    assert last == {
        "ids": [9, 9],
        "samples": [1, 2],
        "counts": [0, 3],
        "reasons": [1, 3],
        "cached": [16, 16],
        "token_ids": [3, 4, 5],
        "logprobs": [-3, -4, -5],
        "top_ids": [3, 4, 4, 5, 5, 6],
        "top_logprobs": [-3, -4, -4, -5, -5, -6],
        "text_lengths": [0, 3],
        "texts": [*b"abc"],
        "stops": [-1, 1],
    }


def test_samples_without_a_token() -> None:
    made = SampleColumns(9, 0, -1, NAMES, text=False, stops=False)
    made.add(0, rows(), "", Reason.STOP, -1)
    _, columns = made.columns()
    assert columns.keys() == {"ids", "samples", "counts", "reasons", "cached", "token_ids"}
    assert columns["token_ids"].size == 0
    assert chosen(columns, np.asarray([True]))["counts"].tolist() == [0]


def test_versions_of_the_weights() -> None:
    made = SampleColumns(9, 0, -1, NAMES, text=False, stops=False)
    for sample, versions in enumerate(([0, 0, 1], [], [1])):
        tokens = np.arange(len(versions), dtype=np.int32)
        made.add(sample, TokenRows(tokens, versions=np.asarray(versions, np.int32)), "", Reason.LENGTH, -1)
    header, columns = made.columns()
    assert header.versions == ("default", "step-1")
    assert columns["span_counts"].tolist() == [2, 0, 1]
    assert columns["span_ends"].tolist() == [2, 3, 1]
    assert columns["span_versions"].tolist() == [0, 1, 1]
    last = chosen(columns, np.asarray([False, True, True]))
    assert last["span_counts"].tolist() == [0, 1]
    assert last["span_versions"].tolist() == [1]
    alone = SampleColumns(9, 0, -1, NAMES, text=False, stops=False)
    alone.add(0, TokenRows(np.arange(2, dtype=np.int32), versions=np.ones(2, np.int32)), "", Reason.LENGTH, -1)
    header, columns = alone.columns()
    assert header.versions == ("step-1",)
    assert "span_counts" not in columns


def test_what_filters_kept() -> None:
    made = SampleColumns(9, 0, 0, NAMES, text=False, stops=False)
    none = np.empty((2, 0), np.int32)
    ids, kept, masses = np.arange(2, dtype=np.int32), np.asarray([3, 4], np.int32), np.asarray([0.375, 0.5], np.float32)
    made.add(0, TokenRows(ids, -ids.astype(np.float32), none, none.astype(np.float32), kept, masses), "", 2, -1)
    _, columns = made.columns()
    assert columns["kept"].tolist() == [3, 4]
    assert columns["masses"].tolist() == [0.375, 0.5]
    assert chosen(columns, np.asarray([True]))["kept"].tolist() == [3, 4]
