"""The bytes of a request to its Struct, or an ApiError that names the field.

Knows JSON and how to word an error; knows no model and no server state.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, TypeVar, get_args

import msgspec

from toka_async.openai.errors import ApiError, bad_request
from toka_async.openai.fields import MAX_SHOWN, check_fields
from toka_async.openai.json_items import count_items
from toka_async.openai.requests import WireRequest

LARGE = 1 << 20  # bytes of a request that callers parse in a thread
T = TypeVar("T", bound=WireRequest)

MAX_ITEMS = 1 << 20  # of a body; parsing them stops all other threads for some tenths of a second
ITEM_BYTES = 128  # that an item becomes, all sorts of them considered
FEW_BYTES = 1 << 16  # of a body that cannot have many items
MAX_EXPLAINED = 1 << 20  # bytes of a broken body that is looked at again
JSON_NAMES = {list: "an array", str: "a string", int: "a number", float: "a number", bool: "a bool", type(None): "null"}
SURROGATE = re.compile("[\ud800-\udfff]")

_LOCATED = re.compile(r"^(?P<what>.*?)(?: - at (?P<key>`key` in )?`\$\.(?P<path>.*)`)?$", re.DOTALL)


def parse_request(raw: bytes | bytearray, kind: type[T]) -> T:
    """The request in `raw`, a JSON object; an explicit null means an absent field.

    Raises:
        ApiError: 400; not JSON, a lone surrogate, NaN, a wrong type, an unknown or unsupported field, … 413; it has so
            many items that parsing them would stop everything else.
    """
    check_items(raw)
    return parse_fields(decode_object(raw), kind)


def prepare_parsing(kind: type[WireRequest]) -> None:
    """Examines the fields of a kind of requests, which takes longer than to parse many of them."""
    find_objects(kind)
    msgspec.json.Decoder(kind)  # what it finds out is kept with the type


def check_items(raw: bytes | bytearray) -> None:
    """Raises ApiError (413) when JSON has more items than may be parsed at once."""
    if len(raw) > FEW_BYTES and (num := count_items(raw, MAX_ITEMS)) > MAX_ITEMS:
        raise ApiError(
            413,
            f"the body has {num} JSON items (elements, pairs, arrays and objects), and can have {MAX_ITEMS}; "
            "send fewer in a request, or token ids over ZeroMQ",
            code="too_many_items",
        )


def count_parsed_bytes(raw: bytes | bytearray) -> int:
    """The memory that a body takes at most when it is parsed, with what may be needed meanwhile.

    A string takes up to four bytes a character.
    """
    is_plain = raw.isascii() and b"\\u" not in raw
    return (2 if is_plain else 4) * len(raw) + ITEM_BYTES * min(count_items(raw, MAX_ITEMS), MAX_ITEMS)


def bound_parsed_bytes(num_bytes: int) -> int:
    """Returns the most that `count_parsed_bytes` gives for a body of so many bytes."""
    return 4 * num_bytes + ITEM_BYTES * MAX_ITEMS


def parse_fields(fields: dict[str, Any], kind: type[T]) -> T:
    """Parses an object that is decoded already, as `parse_request` does."""
    fields = select_given_fields(fields, kind)
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise locate(error, fields) from None


def select_given_fields(fields: dict[str, Any], kind: type[WireRequest], where: str = "") -> dict[str, Any]:
    """Checks fields as `check_fields` does, also those of the objects inside."""
    given = check_fields(fields, kind.__struct_encode_fields__, kind.unsupported, where)
    for name, kinds in find_objects(kind).items():
        value = given.get(name)
        if isinstance(value, dict):
            given[name] = select_object(value, kinds, where + name)
        elif isinstance(value, list):
            given[name] = [
                select_object(each, kinds, f"{where}{name}[{place}]") if isinstance(each, dict) else each
                for place, each in enumerate(value)
            ]
    return given


def select_object(value: dict[str, Any], kinds: tuple[type[WireRequest], ...], where: str) -> dict[str, Any]:
    """As `select_given_fields`, of an object that is of one of these kinds. Several are told apart by their tags."""
    tags = {each.__struct_config__.tag: each for each in kinds}
    field = kinds[0].__struct_config__.tag_field
    if field is None:
        return select_given_fields(value, kinds[0], f"{where}.")
    tag = value.get(field)
    untagged = next((name for name, each in tags.items() if each.is_untagged), None)
    tag = untagged if tag is None else tag
    if not isinstance(tag, str) or tag not in tags:
        got = (
            "it is missing"
            if tag is None
            else f"got {tag[:MAX_SHOWN]!r}"
            if isinstance(tag, str)
            else "got another type"
        )
        param = f"{where}.{field}"
        raise bad_request(f"'{param}' must be {' or '.join(map(str, tags))}; {got}", param=param)
    rest = {name: each for name, each in value.items() if name != field}
    return {**select_given_fields(rest, tags[tag], f"{where}."), field: tag}


@cache
def find_objects(kind: type[WireRequest]) -> dict[str, tuple[type[WireRequest], ...]]:
    """The fields of a request that are objects with fields of their own, or lists of such objects: their kinds."""
    inside = {field.encode_name: list(find_parts(field.type)) for field in msgspec.structs.fields(kind)}
    types = {name: [each for each in given if isinstance(each, type)] for name, given in inside.items()}
    kinds = {name: tuple(each for each in given if issubclass(each, WireRequest)) for name, given in types.items()}
    return {name: each for name, each in kinds.items() if each}


def find_parts(kind: Any) -> Iterator[Any]:
    """A type, and the types that it is made of."""
    yield kind
    for part in get_args(kind):
        yield from find_parts(part)


def decode_object(raw: bytes | bytearray) -> dict[str, Any]:
    """The JSON object in `raw`. Raises ApiError (400) when it is anything else."""
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        # For what is not UTF-8 msgspec raises its own error since 0.23, and Python's before.
        fault = find_not_utf8(raw) or find_unreadable(raw)
        raise fault or bad_request(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise bad_request("the body is nested too deeply") from None
    if not isinstance(value, dict):
        raise bad_request(f"the body must be a JSON object, not {JSON_NAMES[type(value)]}")
    return value


def find_not_utf8(raw: bytes | bytearray) -> ApiError | None:
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        return bad_request(f"the body is not valid UTF-8: {error.reason}")
    return None


def find_unreadable(raw: bytes | bytearray) -> ApiError | None:
    """The error for what only a laxer parser reads, naming its field: numbers that are not finite, lone surrogates."""
    if len(raw) > MAX_EXPLAINED:
        return None
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    for name, value in fields.items() if isinstance(fields, dict) else ():
        shown = name.encode("ascii", "backslashreplace").decode()[:MAX_SHOWN]
        if fault := fault_in([name, value]):
            return bad_request(f"the body is not valid JSON: '{shown}' has {fault}", param=shown)
    return None


def fault_in(value: object) -> str | None:
    """Describes what makes `value`, as a laxer parser read it, invalid JSON; None if it is valid. Any depth will do."""
    left = [value]
    while left:
        match left.pop():
            case float() as number if not math.isfinite(number):
                return "a number that is not finite (NaN, or too large)"
            case str() as text if SURROGATE.search(text):
                return "a lone surrogate, which is half of a character"
            case list() as values:
                left += values
            case dict() as pairs:
                left += [*pairs, *pairs.values()]
    return None


def locate(error: msgspec.ValidationError, fields: dict[str, Any]) -> ApiError:
    """msgspec's error as a 400 whose `param` is the path of the field."""
    match = _LOCATED.match(str(error))
    assert match is not None
    what = ("a key: " if match["key"] else "") + match["what"].replace("`", "")
    if match["path"] is None:
        missing = re.search(r"missing required field (\w+)", what)
        param = missing[1] if missing else None
        return bad_request(f"'{param}' is required" if param else what, param=param)
    param = match["path"].removesuffix("[...]")
    value = fields.get(param)
    shown = isinstance(value, int | float) and abs(value) < 1e18 and ", got" not in what
    got = f", got {value!r}" if shown else ""
    return bad_request(f"'{param}': {what[0].lower()}{what[1:]}{got}", param=param)
