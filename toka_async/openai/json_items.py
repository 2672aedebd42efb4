"""Counts the items of a JSON document in its bytes, before it is parsed.

A parser makes an object of some hundred bytes for each item, however short its text, and holds the interpreter's lock
meanwhile. So the number of items tells what parsing costs. Knows JSON's characters, not what they mean.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from toka_async.arrays import Bool, Int64

Bytes = npt.NDArray[np.uint8]

STEP = 1 << 20  # bytes of one pass: its arrays stay small, and NumPy makes them without the interpreter's lock
COMMA, QUOTE, BACKSLASH, BRACE = map(ord, ',"\\{')  # "[" with the bit of 0x20 set is "{"


def count_items(raw: bytes | bytearray, enough: int) -> int:
    """Returns a count not below the arrays, objects and their elements or pairs in `raw`.

    The count is exact above `enough`; below it, commas and brackets in strings may count too, which is faster.
    """
    data = np.frombuffer(raw, np.uint8)
    steps = [data[start : start + STEP] for start in range(0, data.size, STEP)]
    num = sum(int(np.count_nonzero(_is_item(step))) for step in steps)
    if num <= enough:
        return num
    scan = _Scan()
    return sum(int(np.count_nonzero(_is_item(step) & ~scan.in_strings(step))) for step in steps)


def _is_item(step: Bytes) -> Bool:
    made: Bool = (step == COMMA) | ((step | 0x20) == BRACE)
    return made


class _Scan:
    """Finds the bytes that are in strings, one step after the other."""

    def __init__(self) -> None:
        self._in_string = False
        self._escaped = False  # a backslash is before the next byte

    def in_strings(self, step: Bytes) -> Bool:
        quotes: Bool = step == QUOTE
        if len(escaped := self._escaped_places(step)):
            quotes[escaped] = False
        inside: Bool = np.bitwise_xor.accumulate(quotes) ^ self._in_string
        self._in_string = bool(inside[-1])
        return inside

    def _escaped_places(self, step: Bytes) -> Int64:
        """Returns the bytes after an odd number of backslashes; remembers a backslash at the step's end."""
        slashes = (step == BACKSLASH).astype(np.int8)
        edges = np.flatnonzero(np.diff(slashes, prepend=0, append=0)).astype(np.int64, copy=False)
        starts, ends = edges[::2], edges[1::2]
        lengths = ends - starts
        places: Int64 = ends[lengths % 2 == 1]
        if self._escaped:
            if slashes[0]:
                lengths[0] += 1  # the run began in the step before
                places = ends[lengths % 2 == 1]
            else:
                places = np.append(places, 0)
        self._escaped = bool((places == step.size).any())
        inner: Int64 = places[places < step.size]
        return inner
