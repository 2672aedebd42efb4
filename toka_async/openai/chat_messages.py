"""Checks the messages of a chat request and brings them into the shape that chat templates take.

A message becomes a plain dict whose content is a string or a list of text parts. Knows no template: whether a template
takes a role is decided there.
"""

from __future__ import annotations

from typing import Any

import msgspec

from toka_async.openai.errors import ApiError, bad_request

ROLES = ("system", "developer", "user", "assistant", "tool")
# Fields of answers that clients send back in a conversation's history, with the values that mean nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {"annotations": ([],), "refusal": ("",), "tool_calls": ([],)}
STRING_FIELDS = ("name", "tool_call_id", "reasoning_content", "reasoning")

Message = dict[str, Any]

_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}
_CONTENT: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]}
_FUNCTION = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "arguments": {"type": ["string", "object", "null"]}},
    "required": ["name"],
}
_CALL = {"type": "object", "properties": {"function": _FUNCTION}, "required": ["function"]}
_TEXTS: dict[str, Any] = {name: {"type": ["string", "null"]} for name in STRING_FIELDS}
_TEXTS |= {name: {"enum": [*values, None]} for name, values in NEUTRAL.items()}
MESSAGE: dict[str, Any] = {  # the schema of a message
    "anyOf": [
        {
            "type": "object",
            "properties": {"role": {"enum": list(ROLES)}, "content": _CONTENT, **_TEXTS},
            "required": ["role", "content"],
            "additionalProperties": {"type": "null"},
        },
        {
            "title": "tool calls made earlier",
            "type": "object",
            "properties": {
                "role": {"const": "assistant"},
                "content": {"anyOf": [*_CONTENT["anyOf"], {"type": "null"}]},
                **_TEXTS,
                "tool_calls": {"type": "array", "items": _CALL, "minItems": 1},
            },
            "required": ["role", "tool_calls"],
            "additionalProperties": {"type": "null"},
        },
    ]
}


def parse_messages(messages: list[Any], where: str = "messages") -> list[Message]:
    """Returns the messages without nulls. `developer` becomes `system`, which templates know.

    Raises ApiError (400) whose `param` is the place, e.g. `messages[2].content`; `where` is the start of that place.
    """
    if not messages:
        raise bad_request(f"'{where}' must not be empty", param=where)
    return [parse_message(message, f"{where}[{index}]") for index, message in enumerate(messages)]


def parse_message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise make_type_error(where, "must be an object", message)
    given = {name: value for name, value in message.items() if value is not None and value not in NEUTRAL.get(name, ())}
    role = given.get("role")
    if role not in ROLES:
        got = f"got {role[:40]!r}" if isinstance(role, str) else "it is missing" if role is None else "got another type"
        raise bad_request(f"'{where}.role' must be one of {', '.join(ROLES)}; {got}", param=f"{where}.role")
    parsed: Message = {"role": "system" if role == "developer" else role}
    for name, value in given.items():
        if name == "content":
            parsed["content"] = parse_content(value, f"{where}.content")
        elif name in STRING_FIELDS:
            parsed[name] = require_string(value, f"{where}.{name}")
        elif name == "tool_calls" and role == "assistant":
            parsed["tool_calls"] = parse_tool_calls(value, f"{where}.tool_calls")
        elif name != "role":
            place = f"{where}.{name[:40]}"
            raise bad_request(f"'{place}' is not supported", param=place)
    if "content" not in parsed:
        if "tool_calls" not in parsed:
            raise bad_request(f"'{where}.content' is required", param=f"{where}.content")
        parsed["content"] = ""
    return parsed


def parse_content(content: Any, where: str) -> str | list[Message]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise make_type_error(where, "must be a string or a list of text parts", content)
    return [parse_part(part, f"{where}[{index}]") for index, part in enumerate(content)]


def parse_part(part: Any, where: str) -> Message:
    """Returns a text part; other kinds (images, audio, …) raise ApiError."""
    if not isinstance(part, dict):
        raise make_type_error(where, "must be an object", part)
    if part.get("type") != "text":
        raise bad_request(f"'{where}.type': only text parts are supported", param=f"{where}.type")
    for name in part.keys() - {"type", "text"}:
        place = f"{where}.{name[:40]}"
        raise bad_request(f"'{place}' is not supported", param=place)
    return {"type": "text", "text": require_string(part.get("text"), f"{where}.text")}


def parse_tool_calls(calls: Any, where: str) -> list[Message]:
    """Returns the earlier calls with their arguments as objects, since most templates write them as JSON themselves."""
    if not isinstance(calls, list):
        raise make_type_error(where, "must be a list", calls)
    return [parse_tool_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def parse_tool_call(call: Any, where: str) -> Message:
    if not isinstance(call, dict) or not isinstance(function := call.get("function"), dict):
        raise make_type_error(where, "must be an object with a 'function' object", call)
    require_string(function.get("name"), f"{where}.function.name")
    place = f"{where}.function.arguments"
    arguments = function.get("arguments")
    if arguments is None:
        arguments = {}
    elif isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}")
        except (msgspec.DecodeError, RecursionError, UnicodeError):
            raise bad_request(f"'{place}' must be JSON", param=place) from None
    if not isinstance(arguments, dict):
        raise bad_request(f"'{place}' must be a JSON object", param=place)
    return {**call, "function": {**function, "arguments": arguments}}


def require_string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise make_type_error(where, "must be a string", value)
    return value


def make_type_error(where: str, what: str, value: Any) -> ApiError:
    return bad_request(f"'{where}' {what}, not {type(value).__name__}", param=where)
