from __future__ import annotations

from typing import Any

import pytest

from toka_async.openai.chat_messages import parse_messages
from toka_async.openai.errors import ApiError

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def test_roles_and_nulls() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "s", "name": None},
        {"role": "developer", "content": "d"},
        {"role": "user", "content": "u", "name": "me"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None},
        {"role": "tool", "content": "t", "tool_call_id": "1"},
    ]
    assert parse_messages(messages) == [
        {"role": "system", "content": "s"},
        {"role": "system", "content": "d"},
        {"role": "user", "content": "u", "name": "me"},
        {"role": "assistant", "content": "", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": {}}}]},
        {"role": "tool", "content": "t", "tool_call_id": "1"},
    ]


@pytest.mark.parametrize(
    ("given", "parsed"), [('{"a": [1, null]}', {"a": [1, None]}), ("", {}), ({"a": 1}, {"a": 1}), (None, {})]
)
def test_arguments_become_objects(given: Any, parsed: Any) -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": given}}
    (message,) = parse_messages([{"role": "assistant", "tool_calls": [call]}])
    assert message["tool_calls"] == [{"id": "1", "function": {"name": "f", "arguments": parsed}}]


def test_a_call_without_arguments_has_none() -> None:
    (message,) = parse_messages([{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}])
    assert message["tool_calls"] == [{"function": {"name": "f", "arguments": {}}}]


@pytest.mark.parametrize("function", [{}, {"name": None}, {"name": 5}, {"name": ["f"], "arguments": "{}"}])
def test_a_call_names_its_function(function: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        parse_messages([{"role": "assistant", "tool_calls": [{"function": function}]}])
    assert caught.value.param == "messages[0].tool_calls[0].function.name"


@pytest.mark.parametrize("given", ["[1", "[1]", "5", '{"a": "\\ud800"}', "[" * 10_000, 5, True, [1]])
def test_arguments_that_are_no_object(given: Any) -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": given}}
    with pytest.raises(ApiError) as caught:
        parse_messages([{"role": "assistant", "tool_calls": [call]}])
    assert caught.value.param == "messages[0].tool_calls[0].function.arguments"


def test_an_answer_comes_back_as_history() -> None:
    """Fields of OpenAI's answers, and of others', that say nothing."""
    answer: dict[str, Any] = {
        "role": "assistant",
        "content": "x",
        "annotations": [],
        "refusal": "",
        "tool_calls": [],
        "audio": None,
    }
    assert parse_messages([answer]) == [{"role": "assistant", "content": "x"}]


def test_text_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert parse_messages([{"role": "user", "content": parts}]) == [{"role": "user", "content": parts}]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("hi", "messages[0]"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "robot", "content": "x"}, "messages[0].role"),
        ({"role": ["user"], "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{"type": "text", "text": "a", "b": 1}]}, "messages[0].content[0].b"),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]},
            "messages[0].content[1].type",
        ),
        ({"role": "user", "content": "x", "name": 5}, "messages[0].name"),
        ({"role": "user", "content": "x", "mood": "good"}, "messages[0].mood"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "messages[0].tool_calls"),
        ({"role": "assistant", "content": "x", "refusal": "no"}, "messages[0].refusal"),
        ({"role": "assistant", "content": "x", "annotations": [{}]}, "messages[0].annotations"),
        ({"role": "assistant", "content": "x", "tool_calls": {}}, "messages[0].tool_calls"),
        ({"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}, "messages[0].tool_calls[0]"),
    ],
)
def test_the_place_is_named(message: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_messages([message])
    assert (caught.value.status, caught.value.param) == (400, param)


def test_no_messages() -> None:
    with pytest.raises(ApiError, match="must not be empty"):
        parse_messages([])
