"""Checks the tools of a chat and its choice among them. Knows no format in which a model writes calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toka_async.grammars.schema_types import resolve
from toka_async.openai.errors import bad_request
from toka_async.openai.requests import ChatRequest, Tool, ToolChoice
from toka_async.openai.structured import check_installed


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a chat may call.

    shown: the tools as chat templates take them; None without any. offered: the schemas of parameters by name, for each
    tool that may be called. most_calls: None means any number. kept: the schema of each tool's arguments and whether it
    is strict. is_forced: a call must be made. kept_by: the field for which calls are kept to schemas; empty: none.
    """

    shown: list[dict[str, Any]] | None = None
    offered: Mapping[str, Any] = field(default_factory=dict)
    most_calls: int | None = None
    kept: Mapping[str, tuple[Mapping[str, Any], bool]] = field(default_factory=dict)
    is_forced: bool = False
    kept_by: str = ""


def parse_tool_use(request: ChatRequest) -> ToolUse:
    """With the choice `none` the model sees no tools, and with allowed tools only those.

    Raises ApiError (400) for a choice among tools that are not there, and for what cannot be enforced.
    """
    names = [tool.function.name for tool in request.tools]
    if twice := [name for index, name in enumerate(names) if name in names[:index]]:
        raise bad_request(f"'tools' has two functions {twice[0]!r}", param="tools")
    choice = request.tool_choice
    allowed = names if choice is None or isinstance(choice, str) else _parse_choice(choice, names)
    if not names and choice not in (None, "none", "auto"):
        raise bad_request("'tool_choice' needs tools", param="tool_choice")
    is_named = isinstance(choice, ToolChoice) and choice.allowed_tools is None
    is_forced = choice == "required" or (isinstance(choice, ToolChoice) and _is_forced(choice))
    if choice == "none" or not names:
        return ToolUse()
    tools = [tool for tool in request.tools if tool.function.name in allowed]
    strict = next((index for index, each in enumerate(request.tools) if each in tools and each.function.strict), None)
    kept_by = "tool_choice" if is_forced else "" if strict is None else f"tools[{strict}].function.strict"
    if kept_by:
        check_installed(kept_by)
    kept = {each.function.name: (each.function.parameters or {}, each.function.strict) for each in tools}
    return ToolUse(
        shown=show_tools(request.tools if is_named else tools),
        offered={tool.function.name: _properties(tool) for tool in tools},
        most_calls=None if request.parallel_tool_calls and not is_named else 1,
        kept=kept,
        is_forced=is_forced,
        kept_by=kept_by,
    )


def show_tools(tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
    """Tools as chat templates take them: without what the model is not to see; None without any."""
    return [{"type": "function", "function": _show_function(tool)} for tool in tools] or None


def _show_function(tool: Tool) -> dict[str, Any]:
    function = tool.function
    fields = {"name": function.name, "description": function.description, "parameters": function.parameters}
    return {name: value for name, value in fields.items() if value is not None}


def _properties(tool: Tool) -> Any:
    """The schemas of parameters by name, without references."""
    parameters = tool.function.parameters or {}
    properties = resolve(parameters, parameters).get("properties", {})
    if not isinstance(properties, dict):
        return properties
    return {name: resolve(schema, parameters) for name, schema in properties.items()}


def _parse_choice(choice: ToolChoice, names: Sequence[str]) -> list[str]:
    """The names of the tools that the choice leaves."""
    given = choice.function if choice.type == "function" else choice.allowed_tools
    other = choice.allowed_tools if choice.type == "function" else choice.function
    where = f"tool_choice.{choice.type}"
    if given is None or other is not None:
        raise bad_request(
            f"'tool_choice' of the type {choice.type!r} has {choice.type!r} and nothing else", param=where
        )
    if choice.allowed_tools is None:
        assert choice.function is not None
        chosen = [choice.function.name]
    else:
        chosen = [each.function.name for each in choice.allowed_tools.tools]
    if missing := [name for name in chosen if name not in names]:
        raise bad_request(f"'{where}': there is no function {missing[0]!r} in tools", param=where)
    return chosen


def _is_forced(choice: ToolChoice) -> bool:
    return choice.allowed_tools is None or choice.allowed_tools.mode == "required"
