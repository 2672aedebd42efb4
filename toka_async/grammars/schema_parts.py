"""Lists the schemas within a JSON schema, by what each keyword means: a property may be named as a keyword is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from toka_async.grammars.errors import GrammarError

# Keywords whose values are a schema, or a list of them; and those whose values are schemas by name.
SCHEMAS = frozenset(
    (
        *("items", "prefixItems", "additionalItems", "unevaluatedItems", "contains", "allOf", "anyOf", "oneOf", "not"),
        *("if", "then", "else", "additionalProperties", "unevaluatedProperties", "propertyNames", "contentSchema"),
    )
)
NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"))


def copy_schema(schema: Any) -> Any:
    """Raises GrammarError."""
    try:
        return json.loads(json.dumps(schema))
    except RecursionError:
        raise GrammarError("the schema is nested too deeply") from None


def list_schemas(root: Any) -> Iterator[dict[str, Any]]:
    """Lists each schema that is an object once: the root, those within, and those that any of them refers to.

    A schema may be changed before the next is asked for.
    """
    found, seen = [root], set[int]()
    while found:
        schema = found.pop()
        if not isinstance(schema, dict) or id(schema) in seen:
            continue
        seen.add(id(schema))
        yield schema
        for name, inner in schema.items():
            if name in SCHEMAS:
                found += inner if isinstance(inner, list) else [inner]
            elif name in NAMED:
                found += inner.values() if isinstance(inner, dict) else []
            elif name == "$ref":
                found.append(_find_target(inner, root))


def _find_target(reference: Any, root: Any) -> Any:
    """What a reference means that is a path, which may lead through keywords that are nobody's."""
    _, mark, path = reference.partition("#/") if isinstance(reference, str) else ("", "", "")
    target = root if mark else None
    for step in path.split("/"):
        key = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(target, list):
            target = target[int(key)] if key.isdecimal() and int(key) < len(target) else None
        else:
            target = target.get(key) if isinstance(target, dict) else None
    return target
