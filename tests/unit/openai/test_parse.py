from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from toka_async.openai.errors import ApiError
from toka_async.openai.fields import UNSUPPORTED
from toka_async.openai.parse import (
    MAX_ITEMS,
    bound_parsed_bytes,
    count_parsed_bytes,
    fault_in,
    parse_fields,
    parse_request,
)
from toka_async.openai.requests import MAX_IDS, ChatRequest, CompletionRequest, DirectRequest, StreamOptions


def completion(**fields: Any) -> CompletionRequest:
    return parse_request(json.dumps({"prompt": "x", **fields}).encode(), CompletionRequest)


def problem(raw: bytes | str | dict[str, Any]) -> ApiError:
    if isinstance(raw, dict):
        raw = json.dumps({"prompt": "x", **raw})
    with pytest.raises(ApiError) as caught:
        parse_request(raw if isinstance(raw, bytes) else raw.encode(), CompletionRequest)
    assert caught.value.status == 400
    return caught.value


def test_values_arrive() -> None:
    wire = completion(n=3, temperature=1, stop=["a"], stream=True, stream_options={"include_usage": True})
    assert (wire.n, wire.temperature, wire.stop) == (3, 1.0, ["a"])
    assert wire.stream_options == StreamOptions(include_usage=True)


def test_null_is_absent() -> None:
    names = [*CompletionRequest.__struct_encode_fields__, *UNSUPPORTED]
    nulls = {name: None for name in names if name != "prompt"}
    assert completion(**nulls) == completion()
    assert completion(stream_options={"include_usage": None}).stream_options == StreamOptions()


@pytest.mark.parametrize(
    "raw",
    [
        *(b"", b"{", b"[" * 100_000, b"[]", b'"text"', b"null"),
        *(b'{"prompt": "x",}', b'{"prompt": "\xed\xa0\x80"}', b'{"prompt": "\xff"}'),
    ],
)
def test_what_is_no_json_object(raw: bytes) -> None:
    assert problem(raw).param is None


@pytest.mark.parametrize(
    ("raw", "param", "fault"),
    [
        (b'{"prompt": "x", "temperature": NaN}', "temperature", "not finite"),
        (b'{"prompt": "x", "temperature": -Infinity}', "temperature", "not finite"),
        (b'{"prompt": "x", "temperature": 1e999}', "temperature", "not finite"),
        (b'{"logit_bias": {"5": NaN}, "prompt": "x"}', "logit_bias", "not finite"),
        (b'{"prompt": "a\\ud800b", "n": 1}', "prompt", "lone surrogate"),
        (b'{"prompt": "\\udc00 x"}', "prompt", "lone surrogate"),
        (b'{"prompt": "x", "stop": ["a", "\\ud800"]}', "stop", "lone surrogate"),
        (b'{"prompt": "x", "metadata": {"\\ud800": "a"}}', "metadata", "lone surrogate"),
        (b'{"prompt": "x", "\\ud800": 1}', "\\ud800", "lone surrogate"),
    ],
)
def test_values_that_are_no_json_are_named(raw: bytes, param: str, fault: str) -> None:
    error = problem(raw)
    assert error.param == param
    assert f"'{param}' has " in error.message
    assert fault in error.message


def test_a_pair_of_surrogates_is_a_character() -> None:
    assert parse_request(b'{"prompt": "\\ud83d\\ude42"}', CompletionRequest).prompt == "🙂"


@pytest.mark.parametrize(("raw", "kind"), [(b"[1]", "an array"), (b"null", "null"), (b"3", "a number")])
def test_what_a_body_is_instead_of_an_object(raw: bytes, kind: str) -> None:
    assert problem(raw).message == f"the body must be a JSON object, not {kind}"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *[({"n": wrong}, "n") for wrong in ("three", 1.5, True, 0)],
        *[({"temperature": wrong}, "temperature") for wrong in (-0.1, 2.1, "hot")],
        *[({"top_p": wrong}, "top_p") for wrong in (0, 2)],
        *[({"logprobs": wrong}, "logprobs") for wrong in (-2, 2**31, "1")],
        *[({"logit_bias": wrong}, "logit_bias") for wrong in ({"5": 101}, [1])],
        *[({"prompt": wrong}, "prompt") for wrong in (7, None)],
        *[({name: wrong}, name) for name, wrong in (("top_k", -2), ("min_p", 1.5), ("presence_penalty", 3))],
        *[({name: wrong}, name) for name, wrong in (("repetition_penalty", 0), ("seed", 2**63), ("stop", 7))],
        *[({name: wrong}, name) for name, wrong in (("metadata", {"a": 1}), ("max_tokens", -1), ("echo", "yes"))],
        ({"stop": ["a", 7]}, "stop[1]"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ],
)
def test_the_field_is_named(fields: dict[str, Any], param: str) -> None:
    error = problem(fields)
    assert error.param == param
    assert f"'{param}'" in error.message


def test_the_range_and_the_value_are_stated() -> None:
    assert problem({"temperature": 5}).message == "'temperature': expected float <= 2.0, got 5"


def test_an_unknown_field_gets_a_hint() -> None:
    assert problem({"temprature": 1}).message == "unknown field 'temprature'; did you mean 'temperature'?"
    assert problem({"xyzzy": 1}).message == "unknown field 'xyzzy'"


def test_an_unknown_nested_field() -> None:
    error = problem({"stream": True, "stream_options": {"include_usages": True}})
    assert error.param == "stream_options.include_usages"
    assert error.message == (
        "unknown field 'stream_options.include_usages'; did you mean 'stream_options.include_usage'?"
    )


def test_of_several_unsupported_fields_the_one_that_matters_is_named() -> None:
    """A client's library writes them in any order; without tools nobody would choose one."""
    error = problem({"tool_choice": "required", "audio": {}, "tools": [{}]})
    assert error.param == "tools"
    assert error.message == (
        "'tools' is not supported; nor are tool_choice, audio; leave it out, or give an empty list"
    )


def test_a_null_is_absent_whatever_its_name() -> None:
    assert completion(never_heard_of=None, stream_options={"nor_of_this": None}) == completion(stream_options={})


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_unsupported_fields(name: str) -> None:
    def parsed(value: Any) -> CompletionRequest | DirectRequest:
        if name in CompletionRequest.__struct_encode_fields__:
            return parse_fields({name: value}, DirectRequest)
        return parse_fields({"prompt": "x", name: value}, CompletionRequest)

    with pytest.raises(ApiError) as caught:
        parsed({"anything": "else"})
    error = caught.value
    assert error.param == name
    assert error.code == "unsupported_parameter"
    assert "not supported" in error.message
    for neutral in UNSUPPORTED[name]:
        assert parsed(neutral) == parsed(None)


def test_a_neutral_number_is_no_bool() -> None:
    assert problem({"length_penalty": True}).param == "length_penalty"


def test_a_field_of_the_other_endpoint() -> None:
    with pytest.raises(ApiError) as caught:
        parse_request(b'{"messages": [], "echo": true}', ChatRequest)
    assert caught.value.param == "echo"


@pytest.mark.parametrize("unit", [b"[],", b"{},", b'{"a":0},', b"1.5,", b"7,", b'"",', b"[[]],"])
def test_a_body_of_very_many_items_is_refused_before_it_is_parsed(unit: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def parsed(*_: object) -> None:
        raise AssertionError("it was parsed")

    raw = b'{"metadata":[' + unit * (MAX_ITEMS + 1) + b"0]}"
    monkeypatch.setattr("toka_async.openai.parse.decode_object", parsed)
    with pytest.raises(ApiError, match=f"JSON items .* can have {MAX_ITEMS}") as caught:
        parse_request(raw, CompletionRequest)
    assert (caught.value.status, caught.value.code) == (413, "too_many_items")


def test_commas_in_a_text_are_no_items() -> None:
    text = ",[{" * (MAX_ITEMS + 1)
    assert parse_request(json.dumps({"prompt": text}).encode(), CompletionRequest).prompt == text


@pytest.mark.parametrize("body", [{"prompt": "x" * 1000}, {"prompt": "é" * 1000}, {"prompt": ["ab", "c"] * 100}])
@pytest.mark.parametrize("is_ascii", [False, True])
def test_the_memory_of_a_parsed_body_has_a_bound(body: dict[str, Any], is_ascii: bool) -> None:
    raw = json.dumps(body, ensure_ascii=is_ascii).encode()
    prompt = parse_request(raw, CompletionRequest).prompt
    num_bytes = sys.getsizeof(prompt) + sum(map(sys.getsizeof, prompt if isinstance(prompt, list) else ()))
    assert num_bytes <= count_parsed_bytes(raw) + 128 <= bound_parsed_bytes(len(raw)) + 128


@pytest.mark.parametrize("depth", [100, 500, 900])
def test_what_is_no_json_after_deep_nesting_is_named(depth: int) -> None:
    raw = b'{"b":%b,"a":NaN}' % (b"[" * depth + b"]" * depth)
    with pytest.raises(ApiError, match="'a' has a number that is not finite"):
        parse_request(raw, CompletionRequest)


def test_nesting_of_any_depth_is_looked_through() -> None:
    value: Any = float("nan")
    for _ in range(10_000):
        value = [{"a": value}]
    assert fault_in(value) == "a number that is not finite (NaN, or too large)"


@pytest.mark.parametrize(
    "fields", [{"stop_token_ids": list(range(MAX_IDS + 1))}, {"logit_bias": {str(i): 1 for i in range(MAX_IDS + 1)}}]
)
def test_ids_have_a_bound(fields: dict[str, Any]) -> None:
    (name,) = fields
    with pytest.raises(ApiError, match=f"length <= {MAX_IDS}") as caught:
        completion(**fields)
    assert caught.value.param == name
