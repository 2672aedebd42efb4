"""The rows of a message of results: versions of the weights, and what filters kept."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toka_async.client.results import VersionSpan, split_rows
from toka_async.protocol import Columns, ProtocolError, Results
from toka_async.server.zmq.result_columns import span_columns

NAMES = ("default", "step-1", "step-2")


def make_message(counts: list[int], **more: list[int] | list[float]) -> tuple[Results, Columns]:
    rows = len(counts)
    columns: Columns = {
        "ids": np.arange(rows),
        "samples": np.zeros(rows, np.int32),
        "counts": np.asarray(counts, np.int32),
        "reasons": np.full(rows, 2, np.int32),
        "cached": np.zeros(rows, np.int32),
        "token_ids": np.arange(sum(counts), dtype=np.int32),
    }
    columns |= {name: np.asarray(values) for name, values in more.items()}
    return Results(seq=1, versions=NAMES, columns=tuple(columns)), columns


def test_without_spans_all_tokens_are_of_the_first_version() -> None:
    rows = list(split_rows(*make_message([2, 0])))
    assert [row.versions for row in rows] == [(VersionSpan("default", 0, 2),), ()]


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=5))
def test_spans_are_those_that_the_server_made(versions: list[list[int]]) -> None:
    counts = [len(row) for row in versions]
    header, columns = make_message(counts)
    flat = np.asarray([number for row in versions for number in row], np.int32)
    columns |= span_columns(np.asarray(counts), flat)
    rows = list(split_rows(Results(seq=1, versions=NAMES, columns=tuple(columns)), columns))
    for row, expected in zip(rows, versions, strict=True):
        told = [span.version for span in row.versions for _ in range(span.start, span.end)]
        assert told == [NAMES[number] for number in expected]
    del header


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"span_counts": [1, 1], "span_ends": [2], "span_versions": [0]}, "span_counts"),
        ({"span_counts": [1, 0], "span_ends": [2]}, "span_versions"),
        ({"span_counts": [1, 0], "span_ends": [2], "span_versions": [3]}, "span_versions"),
        ({"span_counts": [1, 0], "span_ends": [1], "span_versions": [0]}, "span_ends"),
        ({"span_counts": [0, 0], "span_ends": [], "span_versions": []}, "span_ends"),
        ({"span_counts": [2, 0], "span_ends": [2, 2], "span_versions": [0, 1]}, "span_ends"),
        ({"kept": [1]}, "kept"),
        ({"masses": [0.5]}, "masses"),
    ],
)
def test_columns_that_do_not_match_are_refused(more: dict[str, list[int]], field: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        split_rows(*make_message([2, 0], **more))
    assert caught.value.field == field


def test_what_filters_kept() -> None:
    first, last = split_rows(*make_message([2, 1], kept=[3, 4, 5], masses=[0.5, 0.25, 1.0]))
    assert first.kept.tolist() == [3, 4]
    assert last.masses.tolist() == [1.0]
