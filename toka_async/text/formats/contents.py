"""Reads the content of a region: the kinds of `response_template`, and the templates that put a value into shape.

The kinds and their arguments are those of transformers (its documentation, "Response Parsing"). Values are JSON's: what
JSON cannot say, such as a number that is not finite or a lone surrogate, is an error.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

MARKS = ("\x01", "\x02")  # around the number of a string that is taken out of lax JSON
PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")
TRUE = ("true", "1")

Args = Mapping[str, Any]


def read_content(kind: str, text: str, args: Args) -> Any:
    """Raises ValueError for a text that the kind cannot read."""
    try:
        return KINDS[kind](text, args)
    except RecursionError:
        raise ValueError("the content is nested too deeply") from None


def read_json(text: str | bytes) -> Any:
    """Raises ValueError for anything that is not strictly JSON."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise ValueError(str(error)) from None


def _text(text: str, args: Args) -> str:
    return text.strip() if args.get("strip", True) else text


def _int(text: str, args: Args) -> int:
    return int(_text(text, args))


def _float(text: str, args: Args) -> float:
    value = float(_text(text, args))
    if not math.isfinite(value):
        raise ValueError("the number is not finite")
    return value


def _bool(text: str, args: Args) -> bool:
    return _text(text, args).lower() in TRUE


def _json(text: str, args: Args) -> Any:
    """JSON, or a dialect: keys without quotes, strings between other marks, or the text where it is no JSON."""
    working, strings = text, list[str]()
    for opening, closing in args.get("string_delims", ()):
        if any(mark in text for mark in MARKS):
            raise ValueError("the content has control characters")

        def take(match: re.Match[str]) -> str:
            strings.append(match[1])
            return f"{MARKS[0]}{len(strings) - 1}{MARKS[1]}"

        working = re.sub(re.escape(opening) + "(.*?)" + re.escape(closing), take, working, flags=re.DOTALL)
    if args.get("unquoted_keys"):
        working = re.sub(r"(?<=[{,])(\w+):", r'"\1":', working)
    for index, string in enumerate(strings):
        working = working.replace(f"{MARKS[0]}{index}{MARKS[1]}", json.dumps(string))
    try:
        return read_json(working)
    except ValueError:
        if args.get("allow_non_json"):
            return _text(text, args)
        raise


def _xml_inline(text: str, args: Args) -> dict[str, Any]:
    """Values by key, of tags that `tag_pattern` finds."""
    found: dict[str, Any] = {}
    for match in re.finditer(args["tag_pattern"], text, flags=re.DOTALL):
        key, value = match["key"], _read_inner(match["value"] or "", args)
        if key in found and args.get("merge_duplicates"):
            found[key] = [*(found[key] if isinstance(found[key], list) else [found[key]]), value]
        else:
            found[key] = value
    return found


def _kv_lines(text: str, args: Args) -> dict[str, Any]:
    """Values by key, of lines."""
    separator, found = args.get("kv_sep", ":"), dict[str, Any]()
    for line in text.split(args.get("line_sep", "\n")):
        key, is_pair, value = line.strip().partition(separator)
        if is_pair:
            found[_text(key, args)] = _read_inner(_text(value, args), args)
    return found


def _read_inner(text: str, args: Args) -> Any:
    inner = args.get("value_parser")
    return text if inner is None else KINDS[inner.get("name", "text")](text, inner.get("args", {}))


KINDS: Mapping[str, Callable[[str, Args], Any]] = {
    "text": _text,
    "int": _int,
    "float": _float,
    "bool": _bool,
    "json": _json,
    "xml-inline": _xml_inline,
    "kv-lines": _kv_lines,
}


def apply_transform(transform: Any, names: Mapping[str, Any]) -> Any:
    """Fills a shape's placeholders, such as `{content.name}`. Raises ValueError for one that has no value."""
    if isinstance(transform, dict):
        return {key: apply_transform(value, names) for key, value in transform.items()}
    if isinstance(transform, list):
        return [apply_transform(value, names) for value in transform]
    whole = PLACEHOLDER.fullmatch(transform) if isinstance(transform, str) else None
    if whole is None:
        return transform
    value: Any = names
    for key in whole[1].split("."):
        if not isinstance(value, dict | Mapping) or key not in value:
            raise ValueError(f"{transform} has no value")
        value = value[key]
    return value
