from __future__ import annotations

import contextlib

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toka_async.protocol import (
    DTYPES,
    Ack,
    Cancellation,
    Closed,
    Columns,
    Error,
    Header,
    Hello,
    ProtocolError,
    Results,
    Submission,
    from_client,
    from_server,
    pack,
    seal,
)

FIELDS = msgspec.Raw(msgspec.msgpack.encode({"max_tokens": 3}))
COLUMNS: Columns = {
    "ids": np.asarray([0, 2**62]),
    "lengths": np.asarray([2, 1], np.int32),
    "prompts": np.asarray([5, 6, 7], np.int32),
}
SUBMISSION = Submission(fields=FIELDS, ack=3, columns=tuple(COLUMNS))
WORDS = st.sampled_from(["", "a", "temperature", "é", "\x00", "x" * 100])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | WORDS | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(["type", "columns", "fields", "ack", "versions", "session", "received", "ids", "seq"])
HEADERS = st.binary(max_size=64) | st.builds(
    lambda kind, fields: msgspec.msgpack.encode({"type": kind, **fields}),
    st.sampled_from(["hello", "submit", "cancel", "ack", "ping", "bye", "results", "welcome", "error", "?"]),
    st.dictionaries(NAMES, VALUES | st.lists(st.sampled_from([*DTYPES, "?"]), max_size=4), max_size=5),
)


def test_a_submission() -> None:
    frames = [bytes(frame) for frame in pack(SUBMISSION, COLUMNS)]
    header, columns = from_client(frames)
    assert isinstance(header, Submission)
    assert bytes(header.fields) == bytes(FIELDS)
    assert (header.ack, header.columns) == (3, ("ids", "lengths", "prompts"))
    assert {name: values.tolist() for name, values in columns.items()} == {
        "ids": [0, 2**62],
        "lengths": [2, 1],
        "prompts": [5, 6, 7],
    }


def test_the_header_is_a_map_that_other_languages_can_write() -> None:
    raw = msgspec.msgpack.encode({"type": "hello", "versions": [3], "session": b"0123456789abcdef"})
    header, columns = from_client([raw])
    assert header == Hello(versions=(3,), session=b"0123456789abcdef", received=0)
    assert columns == {}
    (frame,) = pack(Results(seq=4, columns=("ids",)), {"ids": np.asarray([1])})
    ids = (1).to_bytes(8, "little")
    packed = {"type": "results", "columns": ["ids"], "data": [ids], "seq": 4, "num_top": 0, "versions": ["default"]}
    assert msgspec.msgpack.decode(frame) == packed


def test_a_client_of_another_version_can_read_that_it_is_one() -> None:
    """Unknown keys are errors in every version, so there are none."""
    (frame,) = pack(Closed(code="refused", message="this server speaks version 3"))
    packed = {"type": "closed", "columns": [], "code": "refused", "message": "this server speaks version 3"}
    assert msgspec.msgpack.decode(frame) == packed


def test_columns_to_the_server_are_not_copied() -> None:
    ids = np.arange(4, dtype=np.int64)
    header, frame = pack(Cancellation(columns=("ids",)), {"ids": ids})
    ids[0] = 77
    _, columns = from_client([header, frame])
    assert columns["ids"].tolist() == [77, 1, 2, 3]
    assert np.shares_memory(columns["ids"], ids)


def test_columns_to_a_client_are_its_own() -> None:
    """Aligned, to be written to, and holding on to nothing else of the message."""
    frames = pack(Results(seq=1, columns=("ids",)), {"ids": np.arange(4)})
    header, columns = from_server(frames)
    assert header == Results(seq=1, columns=("ids",))
    assert columns["ids"].tolist() == [0, 1, 2, 3]
    assert columns["ids"].flags.owndata
    assert columns["ids"].flags.aligned
    columns["ids"][0] = 5


def test_what_is_sealed_is_kept_once() -> None:
    frames, columns = seal(Results(seq=1, columns=("ids",)), {"ids": np.arange(4)})
    assert columns["ids"].tolist() == [0, 1, 2, 3]
    assert np.shares_memory(columns["ids"], np.frombuffer(frames[0], np.uint8))
    assert from_server(frames)[1]["ids"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("data", [[], [b"", b""], [b"1234567"], ["text"], [None], 3])
def test_data_that_does_not_fit_the_columns_is_an_error(data: object) -> None:
    with pytest.raises(ProtocolError):
        from_server([msgspec.msgpack.encode({"type": "results", "seq": 1, "columns": ["ids"], "data": data})])


def test_a_message_to_a_client_has_one_frame() -> None:
    frames = [bytes(frame) for frame in pack(Results(seq=1, columns=("ids",)), {"ids": np.arange(4)})]
    for wrong in ([], [*frames, b""]):
        with pytest.raises(ProtocolError):
            from_server(wrong)


@pytest.mark.parametrize(
    ("header", "frames", "field"),
    [
        ({"type": "nonsense"}, [], "type"),
        ({"type": "ack"}, [], None),
        ({"type": "ack", "ack": -1}, [], "ack"),
        ({"type": "ack", "ack": "1"}, [], "ack"),
        ({"type": "ack", "ack": 1, "extra": 1}, [], None),
        ({"type": "hello", "versions": [], "session": b"0" * 16}, [], "versions"),
        ({"type": "hello", "versions": [3], "session": b"0"}, [], "session"),
        ({"type": "submit", "columns": ["ids"]}, [], "columns"),
        ({"type": "submit", "columns": ["ids", "ids"]}, [b"", b""], "columns"),
        ({"type": "submit", "columns": ["idz"]}, [b""], "columns"),
        ({"type": "submit", "columns": ["ids"]}, [b"1234567"], "ids"),
        ({"type": "results", "seq": 1}, [], "type"),
    ],
)
def test_a_wrong_message_names_what_is_wrong(header: object, frames: list[bytes], field: str | None) -> None:
    with pytest.raises(ProtocolError) as caught:
        from_client([msgspec.msgpack.encode(header), *frames])
    assert caught.value.field == field


def test_no_frames_are_no_message() -> None:
    with pytest.raises(ProtocolError):
        from_client([])


@given(header=HEADERS, frames=st.lists(st.binary(max_size=24), max_size=3))
def test_any_bytes_are_a_message_or_an_error(header: bytes, frames: list[bytes]) -> None:
    for decode, message in ((from_client, [header, *frames]), (from_server, [header])):
        try:
            made, columns = decode(message)
        except ProtocolError:
            continue
        assert isinstance(made, Header)
        assert tuple(columns) == made.columns
        if decode is from_client:
            assert [values.nbytes for values in columns.values()] == [len(frame) for frame in frames]


@given(place=st.integers(0, 200), value=st.integers(0, 255), frame=st.integers(0, 3))
def test_a_flipped_byte_is_a_message_or_an_error(place: int, value: int, frame: int) -> None:
    frames = [bytearray(bytes(each)) for each in pack(SUBMISSION, COLUMNS)]
    frames[frame][place % len(frames[frame])] = value
    with contextlib.suppress(ProtocolError):
        header, columns = from_client([bytes(each) for each in frames])
        assert tuple(columns) == header.columns


@pytest.mark.parametrize("header", [Ack(ack=1), Error(status=400, message="no", retry_after=1.0)])
def test_headers_without_columns(header: Header) -> None:
    (frame,) = pack(header)
    decode = from_client if isinstance(header, Ack) else from_server
    assert decode([frame]) == (header, {})
