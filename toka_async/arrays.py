"""Columns: per-row data as flat byte fields of messages, and as NumPy arrays on both ends.

Knows dtypes and buffers; knows nothing of what a column means.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]

EMPTY = memoryview(b"")

K = TypeVar("K", bound=Hashable)


def column(values: npt.NDArray[np.generic]) -> memoryview:
    """The bytes of `values`, of any shape, as a message field; copied only if they are not contiguous."""
    if values.size == 0:
        return EMPTY
    return np.ascontiguousarray(values).data.cast("B")


def i32_column(values: Sequence[int] | Iterable[int] | Int32) -> memoryview:
    if isinstance(values, np.ndarray):
        return column(values.astype(np.int32, copy=False))
    return column(np.fromiter(values, dtype=np.int32))


def f32_column(values: Sequence[float] | Iterable[float] | Float32) -> memoryview:
    if isinstance(values, np.ndarray):
        return column(values.astype(np.float32, copy=False))
    return column(np.fromiter(values, dtype=np.float32))


def as_i32(field: memoryview) -> Int32:
    """A read-only int32 array over a column's bytes, shape [n]."""
    return np.frombuffer(field, dtype=np.int32)


def as_i64(field: memoryview) -> Int64:
    """A read-only int64 array over a column's bytes, shape [n]."""
    return np.frombuffer(field, dtype=np.int64)


def as_f32(field: memoryview) -> Float32:
    """A read-only float32 array over a column's bytes, shape [n]."""
    return np.frombuffer(field, dtype=np.float32)


def as_bool(field: memoryview) -> Bool:
    """A read-only boolean array over a column's bytes, shape [n]."""
    return np.frombuffer(field, dtype=np.bool_)


def group_places(keys: Iterable[K]) -> dict[K, list[int]]:
    """Find the indices of each key, ascending."""
    found: dict[K, list[int]] = {}
    for place, key in enumerate(keys):
        found.setdefault(key, []).append(place)
    return found


def next_rows(rows: Int32, freed: Int32, joined: Int32) -> Int32:
    """The order of decoding slots after an event: freed slots leave, joined slots append.

    The scheduler and the rank both apply this rule, so the order itself is not sent.

    Args:
        rows: slots in their present order, shape [n].
        freed: slots that leave, in any order; slots not in `rows` are ignored.
        joined: slots that join at the end, in the order given.
    """
    if freed.size and rows.size:
        rows = rows[~np.isin(rows, freed)]
    return np.concatenate([rows, joined]) if joined.size else rows
