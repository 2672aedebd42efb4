from __future__ import annotations

from typing import Any

import pytest

from toka_async.grammars.schema_types import resolve, schema_types

NUMBER, LOOP = {"$ref": "#/$defs/number"}, {"$ref": "#/$defs/loop"}
ROOT: dict[str, Any] = {
    "$defs": {
        "number": {"allOf": [{"$ref": "#/$defs/whole"}], "description": "d"},
        "whole": {"type": "integer"},
        "loop": {"anyOf": [LOOP, {"type": "null"}]},
        "self": {"$ref": "#/$defs/self"},
        "a/b": {"type": "string"},
    }
}


@pytest.mark.parametrize(
    ("schema", "resolved"),
    [
        (NUMBER, {"type": "integer", "description": "d"}),
        ({**NUMBER, "description": "own"}, {"type": "integer", "description": "own"}),
        ({"anyOf": [NUMBER, True]}, {"anyOf": [{"type": "integer", "description": "d"}, True]}),
        ({"$ref": "#/$defs/a~1b"}, {"type": "string"}),
        ({"$ref": "#/$defs/none"}, {"$ref": "#/$defs/none"}),
        ({"$ref": "https://there"}, {"$ref": "https://there"}),
        ({"allOf": [NUMBER, NUMBER]}, {"allOf": [NUMBER, NUMBER]}),
        (True, True),
    ],
)
def test_references_are_followed_within_the_schema(schema: Any, resolved: Any) -> None:
    assert resolve(schema, ROOT) == resolved


def test_references_in_circles_end() -> None:
    assert schema_types(resolve(LOOP, ROOT)) == ["null", "null"]
    assert schema_types(resolve({"$ref": "#/$defs/self"}, ROOT)) == []


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": ["string", "null"]}, ["string", "null"]),
        ({"oneOf": [{"type": "integer"}, {"const": "a"}]}, ["integer", "string"]),
        ({"enum": [1, None]}, ["integer", "null"]),
        ({"properties": {}}, ["object"]),
        ({"items": {}}, ["array"]),
        ({"type": "string", "enum": [1]}, ["string"]),
        ({"type": "integer", "nullable": True}, ["integer", "null"]),
        ({}, []),
        (7, []),
    ],
)
def test_types_of_a_schema(schema: Any, types: list[str]) -> None:
    assert schema_types(schema) == types
