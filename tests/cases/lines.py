"""Lines of batches that are almost right, as hypothesis makes them, and what must become of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from hypothesis import strategies as st

from tests.cases.wire import FLOATS, WORDS, bits, cuts
from toka_async.batches.lines import Checker, read_custom_id, read_lines
from toka_async.batches.results import encode_line
from toka_async.openai.errors import ApiError
from toka_async.openai.requests import ChatRequest, CompletionRequest
from toka_async.server.batch.line_answers import answer_error, parse_line
from toka_async.server.responses.requests import ResponsesRequest

KINDS = (ChatRequest, CompletionRequest, ResponsesRequest)
FIELDS = sorted({"x", *(name for kind in KINDS for name in kind.__struct_encode_fields__)})
URLS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, 1, 2, -1, 2**31, 2**63, 2**64, 10**40])
    | FLOATS.filter(lambda value: abs(value) < 1e308)  # others are no JSON
    | WORDS
    | st.text(max_size=8).filter(lambda text: text.isprintable())
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3), max_leaves=6
)
MESSAGES = st.just([{"role": "user", "content": "hi"}]) | st.lists(
    st.dictionaries(st.sampled_from(["role", "content", "name", "tool_calls", "x"]), VALUES), max_size=3
)


def mostly(good: st.SearchStrategy[Any], other: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """One in eight is another."""
    return st.integers(0, 7).flatmap(lambda number: other if number == 7 else good)


BODIES: st.SearchStrategy[Any] = (
    st.fixed_dictionaries({"prompt": st.just("hi") | VALUES, "max_tokens": st.just(2)})
    | st.fixed_dictionaries({"messages": MESSAGES, "max_tokens": st.just(2)})
    | st.fixed_dictionaries({"input": MESSAGES, "max_output_tokens": st.just(2)})
    | st.builds(
        lambda fields: {"prompt": "hi", "max_tokens": 2} | fields, st.dictionaries(st.sampled_from(FIELDS), VALUES)
    )
    | VALUES
)


def almost(body: Any, url: Any, method: Any, more: dict[str, Any]) -> dict[str, Any]:
    return {"method": method, "url": url, "body": body} | more


LINES = st.builds(
    almost,
    BODIES,
    mostly(st.sampled_from([*[URLS[0]] * 3, *URLS[1:]]), VALUES),
    mostly(st.just("POST"), VALUES | st.just("GET")),
    mostly(st.just({}), st.dictionaries(st.sampled_from(["method", "url", "body", "x"]), VALUES, max_size=1)),
)


def encoded(line: dict[str, Any], custom_id: object) -> bytes:
    return msgspec.json.encode({"custom_id": custom_id} | line)


@st.composite
def spoiled(draw: st.DrawFn) -> bytes:
    """A line whose bytes are wrong somewhere, or are not."""
    frames = [encoded(draw(LINES), draw(st.sampled_from(["a", "b", "c"]) | VALUES))]
    for _ in range(draw(st.integers(0, 2))):
        frames = draw(st.sampled_from([bits, cuts]))(draw, frames)
    return frames[0]


ENDS = st.sampled_from([b"\n", b"\r\n", b"\n\n", b" \n\t", b"\x0c\n"])
FILES = st.lists(st.tuples(spoiled() | st.binary(max_size=40), ENDS), max_size=5).map(
    lambda lines: b"".join(raw + end for raw, end in lines)
)


def checked(path: Path, data: bytes) -> Checker:
    path.write_bytes(data)
    checker = Checker(path, max_lines=100, max_line_bytes=1 << 16)
    while not checker.done:
        checker.step()
    return checker


def check_line(raw: bytes, endpoint: str) -> None:
    """It asks something, or what it is answered is one line of JSON with its name."""
    custom_id, asked = parse_line(endpoint, raw)
    assert custom_id == read_custom_id(raw)
    if not isinstance(asked, Exception):
        assert not asked.stream
        return
    assert isinstance(asked, ApiError)
    answered = answer_error(custom_id, asked)
    done = encode_line("batch_1", 0, len(raw), answered)
    assert (done.failed, answered.status) == (True, 400)
    assert done.data.count(b"\n") == 1
    assert msgspec.json.decode(done.data)["custom_id"] == custom_id


def check_file(path: Path, data: bytes) -> None:
    """It has faults, or each of its lines has an answer or asks something."""
    checker = checked(path, data)
    if checker.faults:
        assert all(fault.message for fault in checker.faults)
        return
    read = read_lines(path, 0, 100, 1 << 20)
    assert len(read) == checker.total
    for each in read:
        check_line(each.raw, "")
