"""Describes the types and values of configuration fields for people. Knows msgspec's types, and no field."""

from __future__ import annotations

import json

from msgspec import inspect

LARGEST = 2**31 - 1  # limit of numbers without their own


def describe_type(kind: object, *, in_full: bool = False) -> str:
    """Describes the values that a field takes; `in_full` adds the limit of all numbers."""
    return _describe_info(inspect.type_info(kind), in_full)


def _describe_info(info: inspect.Type, in_full: bool) -> str:
    match info:
        case inspect.Metadata():
            return _describe_info(info.type, in_full)
        case inspect.UnionType():
            return " or ".join(_describe_info(part, in_full) for part in reversed(info.types))
        case inspect.LiteralType():
            return " or ".join(str(value) for value in info.values)
        case inspect.IntType() | inspect.FloatType():
            return ("integer" if isinstance(info, inspect.IntType) else "number") + _describe_bounds(info, in_full)
        case inspect.BoolType():
            return "true or false"
        case _:
            return "text"


def _describe_bounds(info: inspect.IntType | inspect.FloatType, in_full: bool) -> str:
    low = f"above {info.gt}" if info.gt is not None else f"from {info.ge}" if info.ge is not None else ""
    high = f"to {info.le}" if info.le is not None and (in_full or info.le != LARGEST) else ""
    return "".join(f" {part}" for part in (low, high) if part)


def list_choices(kind: object) -> list[str]:
    """Lists the words that a field takes, if it takes words."""
    info = inspect.type_info(kind)
    info = info.type if isinstance(info, inspect.Metadata) else info
    if isinstance(info, inspect.BoolType):
        return ["true", "false"]
    return [str(value) for value in info.values] if isinstance(info, inspect.LiteralType) else []


def takes_numbers(kind: object) -> bool:
    """Tells whether a field takes numbers, perhaps besides words."""
    info = inspect.type_info(kind)
    info = info.type if isinstance(info, inspect.Metadata) else info
    parts = info.types if isinstance(info, inspect.UnionType) else (info,)
    bare = [part.type if isinstance(part, inspect.Metadata) else part for part in parts]
    return any(isinstance(part, inspect.IntType | inspect.FloatType) for part in bare)


def read_meaning(kind: object) -> str:
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.Metadata), f"{kind} has no description"
    return str((info.extra_json_schema or {}).get("description", ""))


def format_value(value: object) -> str:
    """Formats the value as in TOML, without quotes."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def format_toml(value: bool | int | float | str) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML has JSON's escapes
    return format_value(value)
