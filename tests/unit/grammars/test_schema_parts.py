from __future__ import annotations

from typing import Any

import pytest

from toka_async.grammars.schema_parts import list_schemas

PART = {"type": "integer"}


@pytest.mark.parametrize(
    "root",
    [
        {"properties": {"default": PART}},
        {"properties": {"enum": PART, "const": {"examples": [PART]}}},
        {"$defs": {"examples": PART}},
        {"items": {"anyOf": [{"type": "null"}, PART]}},
        {"items": [PART]},
        {"$ref": "#/components/schemas/a~1b%20c", "components": {"schemas": {"a/b c": PART}}},
        {"allOf": [{"$ref": "#/x/0"}], "x": [PART]},
    ],
)
def test_every_schema_is_listed_whatever_it_is_named(root: Any) -> None:
    assert PART in list(list_schemas(root))


@pytest.mark.parametrize(
    "root",
    [
        {"const": PART},
        {"enum": [PART]},
        {"default": PART, "examples": [PART]},
        {"components": {"a": PART}},
        {"$ref": "#/x/1", "x": [PART]},
        {"$ref": "other"},
        True,
    ],
)
def test_what_is_no_schema_is_not_listed(root: Any) -> None:
    assert PART not in list(list_schemas(root))


def test_a_schema_that_refers_to_itself_is_listed_once() -> None:
    root = {"properties": {"a": {"$ref": "#"}, "b": {"$ref": "#/properties/a"}}}
    assert len(list(list_schemas(root))) == 3
