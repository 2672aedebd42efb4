from __future__ import annotations

from typing import Any

import pytest

from tests.cases.grammars import ORDER
from toka_async.grammars.cost import MOST_CHARACTERS, MOST_EXPRESSIONS, MOST_REMAINDERS, count_remainders, is_costly
from toka_async.grammars.lark import make_grammar, write_json


def schema_grammar(schema: dict[str, Any]) -> str:
    return make_grammar(write_json(schema, strict=True))


def match_all(number: int) -> dict[str, Any]:
    return {"allOf": [{"pattern": f"(a|b)*a(a|b){{{length}}}"} for length in range(number)]}


@pytest.mark.parametrize(
    "schema",
    [
        ORDER,
        match_all(MOST_EXPRESSIONS),
        {"properties": {f"p{number}": {"format": "date"} for number in range(50)}},
        {"type": "integer", "multipleOf": MOST_REMAINDERS},
        {"type": "integer", "multipleOf": 5_000_000},
        {"type": "number", "multipleOf": 0.01},
    ],
)
def test_ordinary_schemas_are_cheap(schema: dict[str, Any]) -> None:
    assert not is_costly(schema_grammar(schema))


@pytest.mark.parametrize(
    "schema",
    [
        match_all(MOST_EXPRESSIONS + 1),
        {"$ref": "#/$defs/a", "$defs": {f"d{number}": {"pattern": "a", "format": "date"} for number in range(4)}},
        {"type": "integer", "multipleOf": 99_999_989},
        {"type": "integer", "multipleOf": 9_765_625},
        {"allOf": [{"multipleOf": number} for number in (7, 11, 13, 17)]},
        {"multipleOf": 0.00001023},
        {"enum": ["x" * MOST_CHARACTERS]},
        {"type": "object", "patternProperties": {"^a": {"type": "null"}}},
    ],
)
def test_intersections_divisions_and_size_are_costly(schema: dict[str, Any]) -> None:
    assert is_costly(schema_grammar(schema))


@pytest.mark.parametrize("operation", ["/a+/ & /[ab]+/", "~/a+/"])
def test_operations_of_lark_are_costly(operation: str) -> None:
    assert is_costly(f"start: A\nA: {operation}\n")


@pytest.mark.parametrize(
    ("divisor", "remainders"),
    [
        *(
            ("7", 7),
            ("700", 7),
            ("0.07", 7),
            ("1e3", 1),
            ("12.5", 125),
            ("-7e999999999", 7),
            ("9" * 5000, 9_999_999_999),
        ),
        *(("NaN", 1), ("null", 1), ('"x"', 1), ("{", 1)),
    ],
)
def test_zeros_at_the_end_do_not_count(divisor: str, remainders: int) -> None:
    assert count_remainders(divisor) == remainders
