"""Reads arguments that are written as plain text, by their JSON schemas."""

from __future__ import annotations

from typing import Any

from toka_async.grammars.schema_types import schema_types
from toka_async.text.formats.contents import TRUE, read_content, read_json

LAST = ("boolean",)  # "1" may be a flag, and is a number before


def read_typed(text: str, schema: object) -> Any:
    """Reads an argument that is written as plain text, by its JSON schema; the text itself where that does not fit."""
    for kind in sorted(schema_types(schema), key=LAST.__contains__):
        try:
            value = _read_type(text, kind)
        except ValueError:
            continue
        if value is not None or kind == "null":
            return value
    return text


def _read_type(text: str, kind: str) -> Any:
    """None: the text is not of this type."""
    match kind:
        case "integer":
            if text.strip().lstrip("+-").isdecimal():
                return int(text)
            return int(number) if (number := read_content("float", text, {})).is_integer() else None
        case "number":
            number = read_content("float", text, {})
            return int(number) if number.is_integer() and "." not in text and abs(number) < 2**53 else number
        case "boolean":
            word = text.strip().lower()
            return word in TRUE if word in ("true", "1", "false", "0") else None
        case "null":
            if text.strip() not in ("null", "None"):
                raise ValueError(text)
        case "object" | "array":
            value = read_json(text)
            return value if isinstance(value, dict if kind == "object" else list) else None
    return None
