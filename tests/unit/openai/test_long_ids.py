"""Long arrays of ids are read as the ordinary parser reads them, or not at all."""

from __future__ import annotations

import json
import random
from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toka_async.openai import long_ids
from toka_async.openai.errors import ApiError
from toka_async.openai.long_ids import LONG, cut_ids
from toka_async.openai.parse import MANY, decode_object, parse_fields, parse_request
from toka_async.openai.prompts import parse_prompts
from toka_async.openai.requests import ChatRequest, CompletionRequest, DetokenizeRequest

FLAT = [random.Random(0).randrange(128_000) for _ in range(80_000)]
LISTS = [FLAT[start : start + 40] for start in range(0, 80_000, 40)]


def listed(value: Any) -> Any:
    """With lists of integers instead of arrays."""
    match value:
        case array() | np.ndarray():
            return value.tolist()
        case list():
            return [listed(each) for each in value]
    return value


def encoded(body: dict[str, Any], indent: int | None = None) -> bytes:
    raw = json.dumps(body, indent=indent).encode()
    assert len(raw) > MANY
    return raw


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("before", [{}, {"n": 2, "stop": ["[1,2", "\\"], "logit_bias": {"1": 2}}])
@pytest.mark.parametrize("after", [{}, {"temperature": 0.5, "stop_token_ids": [1, 2, 3]}])
@pytest.mark.parametrize("prompt", [FLAT, LISTS])
def test_prompts(prompt: list[Any], before: dict[str, Any], after: dict[str, Any], indent: int | None) -> None:
    body = {**before, "prompt": prompt, **after}
    wire = parse_request(bytearray(encoded(body, indent)), CompletionRequest)
    assert isinstance(wire.prompt, list)
    assert all(isinstance(each, np.ndarray) for each in wire.prompt)
    read, whole = parse_prompts(wire.prompt), parse_prompts(prompt)
    assert all(np.array_equal(a, b) for a, b in zip(read, whole, strict=True))
    assert wire.stop_token_ids == after.get("stop_token_ids", [])
    assert wire.n == before.get("n", 1)


def test_tokens() -> None:
    wire = parse_request(encoded({"tokens": FLAT, "model": "x"}), DetokenizeRequest)
    assert isinstance(wire.tokens, array)
    assert (wire.tokens.tolist(), wire.model) == (FLAT, "x")


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"prompt": json.dumps(FLAT)}, CompletionRequest),
        ({"prompt": "\\" + json.dumps(FLAT)}, CompletionRequest),
        ({"prompt": [*FLAT, -1]}, CompletionRequest),
        ({"prompt": [*FLAT, 2**31]}, CompletionRequest),
        ({"prompt": [*FLAT, 1.5]}, CompletionRequest),
        ({"prompt": [*FLAT, [1]]}, CompletionRequest),
        ({"prompt": [*LISTS, []]}, CompletionRequest),
        ({"prompt": [*LISTS, 7]}, CompletionRequest),
        ({"prompt": [LISTS, LISTS]}, CompletionRequest),
        ({"prompt": [*LISTS, "x"]}, CompletionRequest),
        ({"prompt": ["x", *LISTS]}, CompletionRequest),
        ({"prompt": FLAT, "n": 0}, CompletionRequest),
        ({"prompt": FLAT, "unknown": 1}, CompletionRequest),
        ({"prompt": "x", "user": FLAT}, CompletionRequest),
        ({"prompt": "x", "metadata": {"a": FLAT}}, CompletionRequest),
        ({"prompt": "x", "stop_token_ids": FLAT}, CompletionRequest),
        ({"prompt": FLAT, "stop_token_ids": FLAT}, CompletionRequest),
        ({"tokens": LISTS}, DetokenizeRequest),
        ({"tokens": FLAT, "prompt": "x"}, DetokenizeRequest),
        ({"messages": FLAT}, ChatRequest),
    ],
)
def test_what_is_something_else_is_read_as_ever(body: dict[str, Any], kind: type[CompletionRequest]) -> None:
    """The same request, or the same error."""
    assert outcome(lambda: parse_request(encoded(body), kind)) == outcome(lambda: parse_fields(dict(body), kind))


def outcome(parse: Any) -> Any:
    """Of parsing, and of the prompts."""
    try:
        wire = parse()
        fields = {name: listed(getattr(wire, name)) for name in wire.__struct_fields__}
        if "prompt" in fields:
            prompts = [listed(each) for each in parse_prompts(wire.prompt)]
            fields["prompt"] = prompts
        return fields
    except ApiError as error:
        return (error.status, str(error), error.param)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"tokens": %b,]}',
        b'{"tokens": %b',
        b'{"tokens": %b]]}',
        b'{"tokens": [%b}',
        b'{"tokens": %b 5]}',
        b'{"tokens": %b,,5]}',
        b'{"tokens": %b,05]}',
        b'{"tokens": "%b]}',
        b'{"tokens": \\%b]}',
        b"%b]",
    ],
)
def test_what_is_no_json_stays_no_json(raw: bytes) -> None:
    text = raw % json.dumps(FLAT)[:-1].encode()
    with pytest.raises(ApiError) as caught:
        parse_request(text, DetokenizeRequest)
    with pytest.raises(ApiError) as expected:
        decode_object(text)
    assert str(caught.value) == str(expected.value)


def test_a_field_that_is_there_twice_has_its_last_value() -> None:
    flat = json.dumps(FLAT).encode()
    assert parse_request(b'{"tokens": %b, "tokens": [1]}' % flat, DetokenizeRequest).tokens == [1]
    twice = parse_request(b'{"tokens": [1], "tokens": %b}' % flat, DetokenizeRequest)
    assert list(twice.tokens) == FLAT


SPACE = st.sampled_from(["", " ", "\n", "\r\n\t", "  "])


@given(
    lists=st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=6), min_size=1, max_size=30),
    spaces=st.tuples(SPACE, SPACE, SPACE),
    flat=st.booleans(),
    damage=st.one_of(st.none(), st.tuples(st.integers(0, 10**6), st.sampled_from(list('[],0 9-.x"{}')))),
)
@settings(max_examples=150, deadline=None)
def test_small_pieces(
    lists: list[list[int]], spaces: tuple[str, str, str], flat: bool, damage: tuple[int, str] | None
) -> None:
    """With every constant small: what is read is what the ordinary parser reads."""
    before, comma, after = spaces
    value: list[Any] = [each for ids in lists for each in ids] if flat else lists
    text = json.dumps(value, separators=(f"{before},{comma}", ":")).replace("]", f"{after}]")
    raw = bytearray(f'{{"a": "[1]", "prompt":{before}{text}{after}, "n": 1}}'.encode())
    if damage is not None:
        place = damage[0] % len(raw)
        raw[place : place + 1] = damage[1].encode()
    with pytest.MonkeyPatch.context() as patch:
        for name, size in (("LONG", 16), ("STEP", 8), ("PROBE", 2)):
            patch.setattr(long_ids, name, size)
        cut = cut_ids(raw)
    if cut is None:
        return
    try:
        fields = json.loads(cut.rest)
    except ValueError:
        return
    place_of_mark = [name for name, each in fields.items() if each == cut.mark]
    whole = json.loads(raw)
    if place_of_mark:
        (name,) = place_of_mark
        assert listed(cut.ids) == whole[name]
        assert fields | {name: whole[name]} == whole


def test_long_arrays_are_found_wherever_they_begin() -> None:
    for start in range(0, LONG, LONG // 7):
        raw = b'{"model": "%b", "tokens": [%b1]}' % (b"x" * start, b"1, " * (LONG // 3 + 1))
        cut = cut_ids(raw)
        assert cut is not None
        assert len(cut.ids) == LONG // 3 + 2
        assert len(cut.rest) < start + 100


@pytest.mark.parametrize("filling", [b" ", b"1", b"[", b"]", b",", b"[]", b"1,2]"])
def test_much_that_is_no_array_is_looked_at_once(filling: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is that of one pass."""
    scanned = 0
    scan = long_ids._end_of_numbers

    def counting(raw: bytes, place: int) -> int:
        nonlocal scanned
        stop = scan(raw, place)
        scanned += stop - place
        return stop

    monkeypatch.setattr(long_ids, "_end_of_numbers", counting)
    raw = b'{"tokens": 1' + filling * (20 * LONG // len(filling)) + b"}"
    assert cut_ids(raw) is None
    assert scanned <= len(raw)


def test_very_many_lists_are_left_to_the_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = encoded({"prompt": LISTS})
    assert cut_ids(raw) is not None
    monkeypatch.setattr(long_ids, "MOST_LISTS", 100)
    assert cut_ids(raw) is None
