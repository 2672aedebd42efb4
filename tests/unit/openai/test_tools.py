from __future__ import annotations

from typing import Any

import pytest

from toka_async.openai.errors import ApiError
from toka_async.openai.parse import parse_fields
from toka_async.openai.requests import ChatRequest
from toka_async.openai.tools import ToolUse, parse_tool_use

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
F = {"type": "function", "function": {"name": "f", "description": "d", "parameters": PARAMETERS, "strict": False}}
G = {"type": "function", "function": {"name": "g"}}


def tool_use(**fields: Any) -> ToolUse:
    return parse_tool_use(parse_fields({"messages": [], **fields}, ChatRequest))


def allow(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_nulls_are_absent_in_tools_too() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": None, "parameters": None, "strict": None}}
    assert tool_use(tools=[tool], tool_choice=None).shown == [{"type": "function", "function": {"name": "f"}}]


def test_what_templates_and_parsers_get() -> None:
    shown = {"name": "f", "description": "d", "parameters": PARAMETERS}
    used = tool_use(tools=[F, G], parallel_tool_calls=False)
    assert used.shown == [{"type": "function", "function": shown}, {"type": "function", "function": {"name": "g"}}]
    assert used.offered == {"f": {"a": {"type": "integer"}}, "g": {}}
    assert used.most_calls == 1


@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tools": [F], "tool_choice": "none"}, {"tool_choice": "auto"}])
def test_nothing_may_be_called(fields: dict[str, Any]) -> None:
    assert tool_use(**fields) == ToolUse()


@pytest.mark.parametrize(
    ("choice", "names", "most"),
    [
        ("required", ["f", "g"], None),
        ({"type": "function", "function": {"name": "g"}}, ["g"], 1),
        (allow("required", "f"), ["f"], None),
    ],
)
def test_calls_that_must_be_made(choice: Any, names: list[str], most: int | None) -> None:
    used = tool_use(tools=[F, G], tool_choice=choice)
    assert list(used.kept) == list(used.offered) == names
    assert (used.most_calls, used.is_forced, used.kept_by) == (most, True, "tool_choice")
    assert used.kept[names[0]] == ((PARAMETERS if names[0] == "f" else {}), False)


@pytest.mark.parametrize(("choice", "kept_by"), [("auto", "tools[1].function.strict"), (allow("auto", "f"), "")])
def test_a_strict_tool_that_may_be_called_keeps_calls_to_schemas(choice: Any, kept_by: str) -> None:
    strict = {"type": "function", "function": {"name": "g", "strict": True}}
    used = tool_use(tools=[F, strict], tool_choice=choice)
    assert (used.is_forced, used.kept_by) == (False, kept_by)
    assert used.kept["f"] == (PARAMETERS, False)


def test_references_of_parameters_are_resolved_for_those_who_read_them() -> None:
    parameters = {"properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    assert tool_use(tools=tools).offered == {"f": {"a": {"type": "integer"}}}


def test_allowed_tools() -> None:
    assert list(tool_use(tools=[F, G], tool_choice=allow("auto", "g")).offered) == ["g"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [F, F]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [F], "tool_choice": allow("auto", "x")}, "tool_choice.allowed_tools"),
        ({"tools": [F], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tools": [F], "tool_choice": allow("auto", "f") | {"function": {"name": "f"}}}, "tool_choice.allowed_tools"),
        ({"tools": [F], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function"),
    ],
)
def test_choices_that_make_no_sense(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        tool_use(**fields)
    assert caught.value.param == param
