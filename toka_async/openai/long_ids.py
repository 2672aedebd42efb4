"""A long array of token ids in a body, or of lists of them, read a piece at a time.

A JSON parser holds the interpreter's lock until it is through: megabytes of numbers would stop all other threads for
as long, the event loop's too. And Python's integers take several times the memory. Knows bytes and JSON; what the ids
are for is the caller's business. Reads only what is right: to find what is wrong, and to name it, is left to others.
"""

from __future__ import annotations

import re
import secrets
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from toka_async.arrays import Int32

Raw = bytes | bytearray

INT = "i"  # the array's type code: int32
LONG = 1 << 17  # bytes of an array that is certainly found; shorter ones may be
STEP = 1 << 16  # bytes that are parsed at once, and a few more
MOST_LISTS = 1 << 18  # more prompts than that are refused anyway, and an array each would take long
PROBE = 64  # bytes that are looked at to see whether there is such an array

_ID = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_FLAT = msgspec.json.Decoder(list[_ID])
_NESTED = msgspec.json.Decoder(list[list[_ID]])
_NUMBERS = re.compile(rb"[0-9,\[\] \n\r\t]*")
_OTHER = re.compile(rb"[^0-9,\[\] \n\r\t]")
_COMMA = re.compile(rb"(,)")
_COMMA_BETWEEN_LISTS = re.compile(rb"\][ \n\r\t]*(,)")


@dataclass(frozen=True, slots=True)
class Cut:
    """A body without its long array.

    rest: it has `mark`, as JSON, in the array's place; it is no JSON if that was inside of a string.
    ids: [p], or a list of such.
    """

    rest: bytes
    mark: dict[str, int]
    ids: array[int] | list[Int32]


def cut_ids(raw: Raw) -> Cut | None:
    """Takes the first long array out of a body; None where there is none, or one that is not of ids."""
    span = _span(raw)
    if span is None:
        return None
    start, end = span
    try:
        ids = _read(raw, start, end)
    except msgspec.DecodeError:
        return None
    if ids is None:
        return None
    mark = {secrets.token_hex(16): 0}  # nobody can have written it
    return Cut(bytes(raw[:start]) + msgspec.json.encode(mark) + raw[end:], mark, ids)


def _span(raw: Raw) -> tuple[int, int] | None:
    """Of what may be an array: it begins and ends with brackets, and is nothing but numbers, brackets and commas."""
    half = LONG // 2
    place = half
    while place < len(raw):
        found = _NUMBERS.match(raw, place, place + PROBE)
        assert found is not None
        if found.end() == min(place + PROBE, len(raw)):
            before = max((other.end() for other in _OTHER.finditer(raw, place - half, place)), default=place - half)
            stop = _end_of_numbers(raw, place)
            start, end = raw.find(b"[", before, place), raw.rfind(b"]", place, stop) + 1
            if 0 <= start < end - half:
                return start, end
            place = stop  # each byte is looked at once, however many there are of no array
        place += half
    return None


def _end_of_numbers(raw: Raw, place: int) -> int:
    while place < len(raw):
        if (found := _OTHER.search(raw, place, place + STEP)) is not None:
            return found.start()
        place += STEP
    return len(raw)


def _read(raw: Raw, start: int, end: int) -> array[int] | list[Int32] | None:
    """The array between those brackets; None, or a msgspec.DecodeError, when it is not what it seemed to be."""
    if raw.find(b"[", start + 1, end) < 0:
        ids = array(INT)
        for piece in _pieces(raw, start + 1, end - 1, _COMMA):
            part = _FLAT.decode(piece)
            if not part:  # there is a comma and nothing behind it
                return None
            ids.fromlist(part)
        return ids
    lists: list[Int32] = []
    for piece in _pieces(raw, start + 1, end - 1, _COMMA_BETWEEN_LISTS):
        parts = _NESTED.decode(piece)
        if not parts or len(lists) > MOST_LISTS:
            return None
        lists += [np.array(part, np.int32) for part in parts]
    return lists


def _pieces(raw: Raw, start: int, end: int, comma: re.Pattern[bytes]) -> Iterator[bytes]:
    """What is between `start` and `end`, in arrays of STEP bytes or a few more, cut at commas."""
    while (found := comma.search(raw, min(start + STEP, end), end)) is not None:
        yield b"[" + raw[start : found.start(1)] + b"]"
        start = found.end()
    yield b"[" + raw[start:end] + b"]"
