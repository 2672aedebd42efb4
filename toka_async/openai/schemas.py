"""JSON Schemas (2020-12) of requests and responses, for the document that describes the API.

A schema also states what parsing does: a null is an absent field, some unsupported fields may have a neutral value, and
the model bounds counts and token ids. Knows no routes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from copy import deepcopy
from typing import Any

import msgspec

from toka_async.openai.fields import Unsupported
from toka_async.openai.generation import RequestLimits
from toka_async.openai.parse import find_objects
from toka_async.openai.requests import ANY_MODEL, WireRequest

Schema = dict[str, Any]

REF = "#/components/schemas/{name}"


def refer_to(kind: type[msgspec.Struct]) -> Schema:
    return {"$ref": REF.format(name=kind.__name__)}


def request_schemas(kinds: Iterable[type[WireRequest]], model: str, limits: RequestLimits) -> dict[str, Schema]:
    """Returns schemas by name, those of inner Structs included. `model` is the model that is served."""
    kinds = list(kinds)
    schemas = build_components(kinds)
    bounds = find_bounds(limits)
    for each in {inner for kind in kinds for inner in list_objects(kind)}:
        schema = schemas[each.__name__]
        fields = schema["properties"]
        for name in fields.keys() & bounds.keys():
            lower_maxima(fields[name], bounds[name])
        if "model" in fields:
            fields["model"] = {"enum": [model, *ANY_MODEL, None]}
        fields |= neutral_fields(each.unsupported, fields)
        if each.is_untagged:
            schema["required"].remove(each.__struct_config__.tag_field)
    for schema in schemas.values():
        allow_null(schema)
    return schemas


def list_objects(kind: type[WireRequest]) -> Iterator[type[WireRequest]]:
    """A kind of objects, and those of the objects inside."""
    yield kind
    for kinds in find_objects(kind).values():
        for each in kinds:
            yield from list_objects(each)


def response_schemas(kinds: Iterable[type[msgspec.Struct]]) -> dict[str, Schema]:
    """Returns schemas by name. A field with a default is always written, so it is required; UNSET is not."""
    schemas = build_components(kinds)
    for schema in schemas.values():
        fields = schema.get("properties", {})
        given = [name for name in fields if name in schema["required"] or "default" in fields[name]]
        schema["required"] = given
        for field in fields.values():
            field.pop("default", None)
            if "anyOf" in field:  # msgspec.Raw, whose schema is empty, has the form of one of the others
                field["anyOf"] = [each for each in field["anyOf"] if each]
    return schemas


def build_components(kinds: Iterable[type[msgspec.Struct]]) -> dict[str, Schema]:
    """Returns msgspec's schemas without the Structs' docstrings, which are for readers of the code."""
    _, schemas = msgspec.json.schema_components(kinds, ref_template=REF)
    for schema in schemas.values():
        schema.pop("description", None)
    return deepcopy(schemas)  # parts of them are constants


def find_bounds(limits: RequestLimits) -> dict[str, int]:
    """Returns the largest numbers in fields that this model allows; a Struct has the bounds of every model."""
    room, last_id = min(limits.max_context, limits.cache_tokens), limits.vocab_size - 1
    counts = {"n": limits.max_n, "best_of": limits.max_n, "min_tokens": limits.max_context}
    names = ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens", "min_new_tokens")
    tokens = dict.fromkeys(names, room)
    logprobs = dict.fromkeys(("logprobs", "top_logprobs", "prompt_logprobs", "top_logprobs_num"), limits.max_logprobs)
    ids = ("prompt", "tokens", "prompt_token_ids", "token_ids", "input_ids", "stop_token_ids", "allowed_token_ids")
    return counts | tokens | logprobs | dict.fromkeys(ids, last_id)


def lower_maxima(schema: object, most: int) -> None:
    if isinstance(schema, dict):
        if "maximum" in schema:
            schema["maximum"] = min(schema["maximum"], most)
        schema = list(schema.values())
    for each in schema if isinstance(schema, list) else ():
        lower_maxima(each, most)


def neutral_fields(unsupported: Unsupported, supported: Collection[str]) -> dict[str, Schema]:
    """Returns schemas of unsupported fields that have neutral values."""
    return {
        name: {"enum": [*values, None], "description": "Not supported; a value that asks for nothing is taken."}
        for name, values in unsupported.items()
        if values and name not in supported
    }


def allow_null(schema: Schema) -> None:
    """Allows null for optional and unknown fields; a null means absent."""
    if schema.get("additionalProperties") is False:
        schema["additionalProperties"] = {"type": "null"}
    fields = schema.get("properties", {})
    for name in fields.keys() - set(schema.get("required", ())):
        field = fields[name]
        default = {"default": field.pop("default")} if field.get("default") is not None else {}
        field.pop("default", None)
        if not accepts_null(field):
            each = field["anyOf"] if field.keys() == {"anyOf"} else [field]
            field = {"anyOf": [*each, {"type": "null"}]}
        fields[name] = field | default


def accepts_null(field: Schema) -> bool:
    return None in field.get("enum", ()) or field.get("const", 0) is None or {"type": "null"} in field.get("anyOf", ())
