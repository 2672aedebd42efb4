"""Messages of direct submission that are almost right, for those who must take anything: as hypothesis makes them.

A message is a list of frames. `mutated` ones have a bit turned, an end cut off, a frame lost, twice or in another's
place, a key of the header lost or with another value, or a column of another length or with other numbers.
"""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import strategies as st

from toka_async.protocol import DTYPES

Frames = list[bytes]

NUMBERS = st.sampled_from([0, 1, 2, 3, 5, -1, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, -(2**63), 2**64 - 1])
FLOATS = st.floats() | st.sampled_from([float("nan"), float("inf"), -0.0, 1e300, 5e-324])
WORDS = st.sampled_from(["", "a", "text", "stop", "\x00", "\u00e9", "x" * 300, *DTYPES])
LEAVES = (
    st.none() | st.booleans() | NUMBERS | st.integers(-(2**63), 2**64 - 1) | FLOATS | WORDS | st.binary(max_size=20)
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3), max_leaves=6
)
ITEMS = st.sampled_from(
    [b"", b"\x00", b"\xff" * 4, b"\xff" * 8, bytes(4), bytes(8), b"\x01\0\0\0", b"\xff\xff\xff\x7f"]
)
COLUMNS = st.lists(ITEMS, max_size=4).map(b"".join) | st.binary(max_size=24)
FRAMES = st.lists(st.binary(max_size=60) | VALUES.map(msgspec.msgpack.encode), max_size=5)  # anything at all


@st.composite
def mutated(draw: st.DrawFn, messages: st.SearchStrategy[Frames]) -> Frames:
    """One of `messages` with one to three things wrong, or none."""
    frames = list(draw(messages))
    for _ in range(draw(st.integers(0, 3))):
        if frames:
            frames = draw(st.sampled_from([bits, cuts, orders, headers, columns]))(draw, frames)
    return frames


def bits(draw: st.DrawFn, frames: Frames) -> Frames:
    place = draw(st.integers(0, len(frames) - 1))
    data = bytearray(frames[place])
    if data:
        data[draw(st.integers(0, len(data) - 1))] ^= 1 << draw(st.integers(0, 7))
    return [*frames[:place], bytes(data), *frames[place + 1 :]]


def cuts(draw: st.DrawFn, frames: Frames) -> Frames:
    place = draw(st.integers(0, len(frames) - 1))
    data = frames[place]
    return [*frames[:place], data[: draw(st.integers(0, len(data)))], *frames[place + 1 :]]


def orders(draw: st.DrawFn, frames: Frames) -> Frames:
    first, second = draw(st.integers(0, len(frames) - 1)), draw(st.integers(0, len(frames) - 1))
    match draw(st.sampled_from(["swap", "drop", "twice"])):
        case "swap":
            frames = list(frames)
            frames[first], frames[second] = frames[second], frames[first]
            return frames
        case "drop":
            return [*frames[:first], *frames[first + 1 :]]
    return [*frames, frames[first]]


def headers(draw: st.DrawFn, frames: Frames) -> Frames:
    """A key of the header, or of the fields in it."""
    try:
        header: Any = msgspec.msgpack.decode(frames[0])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return frames
    if not isinstance(header, dict) or not header:
        return frames
    inside = header.get("fields")
    target = inside if isinstance(inside, dict) and inside and draw(st.booleans()) else header
    key = draw(st.sampled_from(sorted(target, key=repr)))
    if draw(st.booleans()):
        target[key] = draw(VALUES)
    else:
        del target[key]
    return [msgspec.msgpack.encode(header), *frames[1:]]


def columns(draw: st.DrawFn, frames: Frames) -> Frames:
    if len(frames) < 2:
        return frames
    place = draw(st.integers(1, len(frames) - 1))
    return [*frames[:place], draw(COLUMNS), *frames[place + 1 :]]
