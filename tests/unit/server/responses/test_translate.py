from __future__ import annotations

from typing import Any

import msgspec
import pytest

from toka_async.openai.errors import ApiError, bad_request
from toka_async.openai.parse import parse_request
from toka_async.openai.requests import ChatRequest
from toka_async.server.responses.requests import ResponsesRequest
from toka_async.server.responses.translate import make_chat, rename_fields

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "name": "f", "description": "does", "parameters": {"type": "object"}, "strict": True}


def chat(**fields: Any) -> ChatRequest:
    body = msgspec.json.encode({"input": "hi", **fields})
    return make_chat(parse_request(body, ResponsesRequest))


def call(number: int) -> dict[str, Any]:
    return {"type": "function_call", "id": f"fc_{number}", "call_id": f"c{number}", "name": "f", "arguments": "{}"}


def made_call(number: int) -> dict[str, Any]:
    return {"id": f"c{number}", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def test_a_text_is_a_users_message() -> None:
    assert chat().messages == [USER]
    assert chat(instructions="be brief").messages == [{"role": "system", "content": "be brief"}, USER]


def test_what_a_model_did_in_one_turn_is_one_message() -> None:
    items = [
        USER,
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
        },
        call(1),
        call(2),
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}], "encrypted_content": None},
        call(3),
        {"role": "assistant", "content": "after a call"},
        {"role": "assistant", "content": "and again"},
        {"role": "developer", "content": [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ]
    assert chat(input=items).messages == [
        USER,
        {
            "role": "assistant",
            "reasoning_content": "hm",
            "reasoning": "hm",
            "content": "I look.",
            "tool_calls": [made_call(1), made_call(2)],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "tool", "tool_call_id": "c2", "content": "2"},
        {"role": "assistant", "reasoning_content": "so", "reasoning": "so", "tool_calls": [made_call(3)]},
        {"role": "assistant", "content": "after a call"},
        {"role": "assistant", "content": "and again"},
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "no"},
    ]


def test_each_thought_begins_a_turn() -> None:
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    messages = chat(input=[thought, USER, call(1), thought]).messages
    assert [sorted(each) for each in messages] == [
        ["content", "reasoning", "reasoning_content", "role"],
        ["content", "role"],
        ["role", "tool_calls"],
        ["content", "reasoning", "reasoning_content", "role"],
    ]


def test_tools_and_choices() -> None:
    made = chat(tools=[TOOL], tool_choice={"type": "function", "name": "f"}, parallel_tool_calls=False)
    (tool,) = made.tools
    assert (tool.function.name, tool.function.strict, tool.function.parameters) == ("f", True, {"type": "object"})
    assert msgspec.to_builtins(made.tool_choice)["function"] == {"name": "f"}
    assert not made.parallel_tool_calls
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]}
    choice = msgspec.to_builtins(chat(tools=[TOOL], tool_choice=allowed).tool_choice)
    assert choice["allowed_tools"]["mode"] == "required"
    assert choice["allowed_tools"]["tools"] == [{"type": "function", "function": {"name": "f"}}]
    assert chat(tools=[TOOL | {"strict": None}], tool_choice="none").tool_choice == "none"


def test_formats() -> None:
    assert msgspec.to_builtins(chat().response_format)["type"] == "text"
    assert msgspec.to_builtins(chat(text={"format": {"type": "json_object"}}).response_format)["type"] == "json_object"
    made = chat(text={"format": {"type": "json_schema", "name": "n", "schema": {"const": 1}, "strict": True}})
    assert made.response_format is not None
    assert made.response_format.json_schema is not None
    assert (made.response_format.json_schema.wanted, made.response_format.json_schema.strict) == ({"const": 1}, True)


def test_fields_of_chats() -> None:
    fields = {"temperature": 0.5, "top_p": 0.9, "seed": 3, "top_k": 2, "priority": -1, "cache_salt": "s", "stop": "x"}
    made = chat(**fields, max_output_tokens=5, reasoning={"effort": "low"}, stream=True)
    assert {name: getattr(made, name) for name in fields} == fields
    assert (made.max_completion_tokens, made.reasoning_effort, made.stream) == (5, "low", True)
    assert (made.logprobs, made.top_logprobs) == (False, None)
    made = chat(include=["message.output_text.logprobs"], top_logprobs=2)
    assert (made.logprobs, made.top_logprobs) == (True, 2)


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "give the whole conversation as 'input'"),
        ({"conversation": {"id": "conv_1"}}, "conversation", "give the whole conversation as 'input'"),
        ({"store": True}, "store", "give false"),
        ({"background": True}, "background", "give false"),
        ({"tools": [{"type": "web_search", "filters": {}}]}, "tools[0].type", "must be function; got 'web_search'"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type", "got 'file_search'"),
        ({"tool_choice": {"name": "f"}}, "tool_choice.type", "it is missing"),
        ({"text": {"format": {"type": 3}}}, "text.format.type", "another type"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", '"medium"'),
        ({"reasoning": {"summary": "concise"}}, "reasoning.summary", "concise"),
        ({"input": [USER, {"type": "item_reference", "id": "x"}]}, "input[1].type", "got 'item_reference'"),
        ({"input": [USER | {"x": 1}]}, "input[0].x", "unknown field"),
        ({"input": [call(1) | {"arguments": "[1]"}]}, "input[0].arguments", "JSON object"),
        ({"input": [call(1) | {"arguments": "{"}]}, "input[0].arguments", "JSON object"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type", "image"),
        ({"input": []}, "input", "length"),
        ({"top_logprobs": 2}, "top_logprobs", "include"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options", "stream: true"),
        ({"include": ["web_search_call.results"]}, "include[0]", "web_search_call.results"),
    ],
)
def test_what_is_refused_is_named(fields: dict[str, Any], param: str, word: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert word in caught.value.message


@pytest.mark.parametrize(
    ("message", "param", "renamed", "place"),
    [
        ("'max_completion_tokens' is", "max_completion_tokens", "'max_output_tokens' is", "max_output_tokens"),
        ("lower max_tokens or", "max_tokens", "lower max_output_tokens or", "max_output_tokens"),
        ("'messages[1].content' is", "messages[1].content", "'input[1].content' is", "input[1].content"),
        ("the messages are", "messages", "the messages are", "input"),
        ("'response_format.json_schema' x", "response_format.json_schema", "'text.format' x", "text.format"),
        ("'tools[0].function.strict': x", "tools[0].function.strict", "'tools[0].strict': x", "tools[0].strict"),
        ("'tool_choice.function': x", "tool_choice.function", "'tool_choice.name': x", "tool_choice.name"),
        ("'top_p' is", "top_p", "'top_p' is", "top_p"),
        ("anything", None, "anything", None),
    ],
)
def test_errors_have_the_names_of_responses(message: str, param: str | None, renamed: str, place: str | None) -> None:
    error = rename_fields(bad_request(message, param=param, code="x"))
    assert (error.message, error.param, error.code) == (renamed, place, "x")
