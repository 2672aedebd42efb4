"""The types that a value may have by its JSON schema, where the schema may refer to others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOST_REFERENCES = 32  # that are followed in a row
TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
CHOICES = ("anyOf", "oneOf")
# What a schema without a type is about.
SIGNS = {"properties": "object", "items": "array", "prefixItems": "array"}


def resolve(schema: Any, root: Mapping[str, Any]) -> Any:
    """Returns a schema with references within `root` replaced: its own, and those of what it is a choice of."""
    schema = _follow(schema, root)
    if not isinstance(schema, dict):
        return schema
    choices = {name: found for name in CHOICES if isinstance(found := schema.get(name), list)}
    return {**schema, **{name: [_follow(each, root) for each in found] for name, found in choices.items()}}


def _follow(schema: Any, root: Mapping[str, Any]) -> Any:
    for _ in range(MOST_REFERENCES):
        found = _find_other(schema, root) if isinstance(schema, dict) else None
        if not isinstance(found, dict):
            break
        schema = found | {key: value for key, value in schema.items() if key not in ("allOf", "$ref")}
    return schema


def _find_other(schema: dict[str, Any], root: Mapping[str, Any]) -> Any:
    """The schema that another one stands for; None if it stands for itself."""
    whole, path = schema.get("allOf"), schema.get("$ref")
    if isinstance(whole, list) and len(whole) == 1:
        return whole[0]
    if not isinstance(path, str) or not path.startswith("#/"):
        return None
    found: Any = root
    for key in path[2:].split("/"):
        found = found.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found


def schema_types(schema: object) -> list[str]:
    """The JSON types that a schema names, in order; those of a choice included."""
    if not isinstance(schema, dict):
        return []
    declared = schema.get("type")
    types = [declared] if isinstance(declared, str) else list(declared) if isinstance(declared, list) else []
    for name in CHOICES:
        for choice in found if isinstance(found := schema.get(name), list) else ():
            types += schema_types(choice)
    if not types:
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        types += [TYPES.get(type(each), "null") for each in values] if isinstance(values, list) else []
    if not types:
        types += [kind for sign, kind in SIGNS.items() if sign in schema][:1]
    return [each for each in types if isinstance(each, str)] + (["null"] if schema.get("nullable") else [])
