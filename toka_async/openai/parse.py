"""The bytes of a request to its Struct, or an ApiError that names the field.

Knows JSON and how to word an error; knows no model and no server state.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from toka_async.openai.errors import ApiError, bad_request
from toka_async.openai.fields import check_names, drop_neutral

T = TypeVar("T", bound=msgspec.Struct)

_LOCATED = re.compile(r"^(?P<what>.*?)(?: - at `\$\.(?P<path>.*)`)?$", re.DOTALL)


def parse_request(raw: bytes, kind: type[T]) -> T:
    """The request in `raw`, a JSON object; an explicit null means an absent field.

    Raises:
        ApiError: 400; not JSON, a lone surrogate, NaN, a wrong type, an unknown or unsupported field, …
    """
    fields = decode_object(raw)
    supported = frozenset(kind.__struct_encode_fields__)
    fields = drop_neutral(fields, supported)
    check_names(fields, supported)
    options = fields.get("stream_options")
    if isinstance(options, dict):
        fields["stream_options"] = {name: value for name, value in options.items() if value is not None}
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise located(error, fields) from None


def decode_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`. Raises ApiError (400) when it is anything else."""
    try:
        value = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise bad_request(f"the body is not valid JSON: {error}") from None
    except UnicodeDecodeError as error:
        raise bad_request(f"the body is not valid UTF-8: {error.reason}") from None
    except RecursionError:
        raise bad_request("the body is nested too deeply") from None
    if not isinstance(value, dict):
        raise bad_request(f"the body must be a JSON object, not {type(value).__name__}")
    return value


def located(error: msgspec.ValidationError, fields: dict[str, Any]) -> ApiError:
    """msgspec's error as a 400 whose `param` is the path of the field."""
    match = _LOCATED.match(str(error))
    assert match is not None
    what = match["what"].replace("`", "")
    if match["path"] is None:
        missing = re.search(r"missing required field (\w+)", what)
        param = missing[1] if missing else None
        return bad_request(f"'{param}' is required" if param else what, param=param)
    param = match["path"].removesuffix("[...]")
    value = fields.get(param)
    shown = isinstance(value, int | float) and abs(value) < 1e18 and ", got" not in what
    got = f", got {value!r}" if shown else ""
    return bad_request(f"'{param}': {what[0].lower()}{what[1:]}{got}", param=param)
