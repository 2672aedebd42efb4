from __future__ import annotations

from typing import Any

import pytest

from tests.cases.grammars import matches
from toka_async.grammars.errors import GrammarError
from toka_async.grammars.exact_schemas import MOST_NAMES, make_exact
from toka_async.grammars.lark import make_grammar, write_json


def test_an_old_keyword_that_means_nothing_changes_nothing() -> None:
    schema = {
        "type": "array",
        "prefixItems": [{"const": 1}],
        "items": {"const": 3},
        "additionalItems": False,
        "minItems": 1,
        "maxItems": 2,
    }
    grammar = make_grammar(write_json(schema, strict=True))
    assert matches(grammar, "[1,3]")
    assert not matches(grammar, "[3]")
    old = {"items": [{"const": 1}], "additionalItems": False, "type": "array"}
    grammar = make_grammar(write_json(old, strict=True))
    assert matches(grammar, "[1]")
    assert not matches(grammar, "[1,1]")


@pytest.mark.parametrize(
    ("schema", "taken"),
    [
        ({"type": "string", "pattern": "^(?=x).*$"}, '"a"'),
        ({"patternProperties": {"^a": {"type": "integer"}, "^ab": {}}, "additionalProperties": False}, '{"ab": "c"}'),
        ({"patternProperties": {r"\d": {}, "[0-9]": {}}}, '{"1": 1}'),
        ({"patternProperties": {"(?=a)": {}}, "additionalProperties": False}, '{"ab": "c"}'),
        ({"type": "number", "maximum": 1e300}, "5"),
        ({"type": "number", "minimum": 1e18}, "5"),
        ({"$schema": "http://foo/", "type": "integer"}, "5"),
        ({"type": "string", "format": "unheard-of"}, '"a"'),
    ],
)
def test_what_cannot_be_enforced_is_refused_or_left_out(schema: dict[str, Any], taken: str) -> None:
    lenient = make_grammar(write_json(schema, strict=False))
    assert matches(lenient, taken)
    option = make_grammar(write_json(schema | {"x-guidance": {"lenient": True}}, strict=True))
    assert matches(option, taken)
    with pytest.raises(GrammarError):
        assert matches(make_grammar(write_json(schema, strict=True)), taken)


def test_names_that_match_one_pattern_are_enforced() -> None:
    schema = {"patternProperties": {"^a": {"type": "integer"}, r"^\d": {}}, "additionalProperties": False}
    for strict in (True, False):
        grammar = make_grammar(write_json({"type": "object", **schema}, strict=strict))
        assert matches(grammar, '{"a": 1, "1": "b"}')
        assert not matches(grammar, '{"a": "b"}')
        assert not matches(grammar, '{"b": 1}')


def test_a_schema_is_not_changed_for_its_owner() -> None:
    schema = {"pattern": ".", "exclusiveMinimum": 0, "maximum": 0.5, "additionalItems": True}
    before = dict(schema)
    write_json(schema, strict=True)
    assert schema == before


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(100_000):
        schema = {"not": schema}
    with pytest.raises(GrammarError, match="too deeply"):
        write_json(schema, strict=False)


def test_many_lenient_patterns_of_names_are_left_out_at_once() -> None:
    """The library would compare each with each other, in the server's loop."""
    named: dict[str, Any] = {f"^{number}_": {} for number in range(MOST_NAMES + 1)}
    schema = make_exact({"patternProperties": named, "additionalProperties": False}, strict=False)
    assert schema == {}
    del named["^0_"]
    assert len(make_exact({"patternProperties": named}, strict=False)["patternProperties"]) == MOST_NAMES
