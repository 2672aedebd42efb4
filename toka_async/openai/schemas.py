"""The Structs of requests and responses as JSON Schemas (2020-12), for the document that describes the API.

Says in a schema what parsing does besides: a null is an absent field, some fields of other servers may have the value
that asks for nothing, counts and token ids are bounded by the model. Knows no routes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from copy import deepcopy
from typing import Any

import msgspec

from toka_async.openai.fields import Unsupported
from toka_async.openai.generation import RequestLimits
from toka_async.openai.parse import objects_in
from toka_async.openai.requests import ANY_MODEL, WireRequest

Schema = dict[str, Any]

REF = "#/components/schemas/{name}"


def reference(kind: type[msgspec.Struct]) -> Schema:
    """To the schema of a Struct, as `request_schemas` and `response_schemas` name it."""
    return {"$ref": REF.format(name=kind.__name__)}


def request_schemas(kinds: Iterable[type[WireRequest]], model: str, limits: RequestLimits) -> dict[str, Schema]:
    """By name; those of the Structs inside too. `model` is the one that is served."""
    kinds = list(kinds)
    schemas = components(kinds)
    bounds = bounds_of(limits)
    for kind in kinds:
        fields = schemas[kind.__name__]["properties"]
        for name in fields.keys() & bounds.keys():
            lower(fields[name], bounds[name])
        if "model" in fields:
            fields["model"] = {"enum": [model, *ANY_MODEL, None]}
        for each in (kind, *objects_in(kind).values()):
            fields = schemas[each.__name__]["properties"]
            fields |= neutral_fields(each.unsupported, fields)
    for schema in schemas.values():
        let_null(schema)
    return schemas


def response_schemas(kinds: Iterable[type[msgspec.Struct]]) -> dict[str, Schema]:
    """By name. What has a default is always written, so it is required; UNSET fields are not."""
    schemas = components(kinds)
    for schema in schemas.values():
        fields = schema.get("properties", {})
        given = [name for name in fields if name in schema["required"] or "default" in fields[name]]
        schema["required"] = given
        for field in fields.values():
            field.pop("default", None)
            if "anyOf" in field:  # what is encoded already (msgspec.Raw) has the form of one of the others
                field["anyOf"] = [each for each in field["anyOf"] if each]
    return schemas


def components(kinds: Iterable[type[msgspec.Struct]]) -> dict[str, Schema]:
    """As msgspec sees the Structs; their docstrings are for those who read the code."""
    _, schemas = msgspec.json.schema_components(kinds, ref_template=REF)
    for schema in schemas.values():
        schema.pop("description", None)
    return deepcopy(schemas)  # parts of them are constants


def bounds_of(limits: RequestLimits) -> dict[str, int]:
    """The largest numbers in fields: what a Struct allows for every model, this one may not."""
    room, last_id = min(limits.max_context, limits.cache_tokens), limits.vocab_size - 1
    counts = {"n": limits.max_n, "best_of": limits.max_n, "min_tokens": limits.max_context}
    tokens = dict.fromkeys(("max_tokens", "max_completion_tokens"), room)
    return counts | tokens | dict.fromkeys(("prompt", "tokens", "stop_token_ids", "allowed_token_ids"), last_id)


def lower(schema: object, most: int) -> None:
    """Lowers every maximum in it."""
    if isinstance(schema, dict):
        if "maximum" in schema:
            schema["maximum"] = min(schema["maximum"], most)
        schema = list(schema.values())
    for each in schema if isinstance(schema, list) else ():
        lower(each, most)


def neutral_fields(unsupported: Unsupported, supported: Collection[str]) -> dict[str, Schema]:
    """Fields that are not supported, and the values that are taken nevertheless."""
    return {
        name: {"enum": [*values, None], "description": "Not supported; a value that asks for nothing is taken."}
        for name, values in unsupported.items()
        if values and name not in supported
    }


def let_null(schema: Schema) -> None:
    """Optional fields may be null, which means absent; so may fields that nobody knows."""
    if schema.get("additionalProperties") is False:
        schema["additionalProperties"] = {"type": "null"}
    fields = schema.get("properties", {})
    for name in fields.keys() - set(schema.get("required", ())):
        field = fields[name]
        default = {"default": field.pop("default")} if field.get("default") is not None else {}
        field.pop("default", None)
        if not takes_null(field):
            each = field["anyOf"] if field.keys() == {"anyOf"} else [field]
            field = {"anyOf": [*each, {"type": "null"}]}
        fields[name] = field | default


def takes_null(field: Schema) -> bool:
    return None in field.get("enum", ()) or field.get("const", 0) is None or {"type": "null"} in field.get("anyOf", ())
