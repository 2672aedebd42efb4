from __future__ import annotations

import json
import random
from decimal import Decimal
from typing import Any

import pytest

from tests.cases.grammars import load_tokenizer, make_vocabulary, matches
from toka_async.grammars.errors import GrammarError
from toka_async.grammars.lark import make_grammar, write_json

LIMITS = ("-10.5", "-10", "-1.01", "-1", "-0.5", "-0.01", "0", "0.01", "0.5", "1", "1.01", "2", "9.99", "10", "10.5")


def compile_strictly(schema: Any) -> str:
    return make_grammar(write_json(schema, strict=True))


def test_no_pair_of_bounds_allows_a_number_beyond_them() -> None:
    """The pairs in which the library is wrong are an exclusive one at a whole number, and another less than 1 away."""
    tokenizer, vocabulary = load_tokenizer(), make_vocabulary()
    near = {Decimal(each) + Decimal(step) for each in LIMITS for step in ("0", "0.001", "-0.001")}
    whole = {int(each) for each in near if each == int(each)}
    texts = sorted({*map(str, near), *map(str, whole), *(f"{each}.0" for each in whole), "-0", "-0.0", "0.0"})
    documents = {text: tokenizer.encode(text, False) for text in texts}
    wrong, num_right = [], 0
    for low in LIMITS:
        for high in LIMITS:
            if Decimal(low) >= Decimal(high):
                continue
            for lower in ("minimum", "exclusiveMinimum"):
                for upper in ("maximum", "exclusiveMaximum"):
                    schema = {"type": "number", lower: json.loads(low), upper: json.loads(high)}
                    matcher = vocabulary.compile(compile_strictly(schema))
                    for text, ids in documents.items():
                        value, row = Decimal(text), matcher.deep_copy()
                        is_taken = row.try_consume_tokens(ids) == len(ids) and row.is_accepting()
                        above = value >= Decimal(low) if lower == "minimum" else value > Decimal(low)
                        below = value <= Decimal(high) if upper == "maximum" else value < Decimal(high)
                        num_right += is_taken and above and below
                        if is_taken and not (above and below):
                            wrong.append((schema, text))
    assert not wrong
    assert num_right > 5000


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "number", "multipleOf": 0.001, "exclusiveMinimum": 0, "maximum": 0.002}, "0.002", "0"),
        ({"allOf": [{"type": "number", "exclusiveMinimum": 1}, {"maximum": 1.01}]}, "1.01", "1"),
        ({"$ref": "#/$defs/a", "maximum": 0.5, "$defs": {"a": {"type": "number", "exclusiveMinimum": 0}}}, "0.5", "0"),
        ({"type": "number", "minimum": 0, "exclusiveMinimum": True, "maximum": 0.5}, "0.5", "0"),
        ({"type": "number", "minimum": 0.25, "exclusiveMinimum": 0, "maximum": 0.5}, "0.25", "0.1"),
        ({"type": "integer", "exclusiveMinimum": 0, "not_a_keyword": 1, "maximum": 7}, "1", "0"),
        ({"type": "integer", "minimum": -(2**63)}, "-5", "0.5"),
        ({"type": ["integer", "null"], "minimum": -(2**63), "maximum": 2**63 - 1}, "5", "0.5"),
        ({"type": "integer", "minimum": 2**53, "maximum": 1e300}, "9007199254740992", "9007199254740991"),
        ({"type": "integer", "maximum": 2**64 - 1}, "5", "0.5"),
        ({"type": "number", "allOf": [{"multipleOf": 0.5}, {"multipleOf": 0.3}]}, "1.5", "1"),
        ({"type": "array", "prefixItems": [{"multipleOf": 70000}, {"multipleOf": 90001}]}, "[70000,90001]", "[1]"),
        ({"enum": [2**53, 2**63 - 1, 7]}, "9223372036854775807", "9223372036854775806"),
        ({"const": {"id": [2**60]}}, '{"id":[1152921504606846976]}', '{"id":[1152921504606847000]}'),
    ],
)
def test_what_is_taken_is_exact(schema: Any, right: str, wrong: str) -> None:
    assert matches(compile_strictly(schema), right)
    assert not matches(compile_strictly(schema), wrong)


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"enum": [9007199254740993]}, "enum"),
        ({"const": 123456789012345678901234567890}, "const"),
        ({"const": {"id": [12345678901234567890123]}}, "const"),
        ({"const": 10**400}, "const"),
        ({"type": "integer", "const": 1e22}, "const"),
        ({"type": "integer", "minimum": 1e19, "maximum": 2e19}, "minimum"),
        ({"type": "integer", "minimum": 2**53 + 1}, "minimum"),
        ({"type": "integer", "exclusiveMinimum": 2**53}, "exclusiveMinimum"),
        ({"type": "integer", "maximum": 10**400}, "maximum"),
        ({"type": "integer", "maximum": -(10**19)}, "maximum"),
        ({"type": "number", "maximum": 1e300}, "maximum"),
        ({"type": "number", "maximum": float("inf")}, "maximum"),
        ({"type": "number", "minimum": 2**57}, "minimum"),
        ({"minimum": 10**30}, "minimum"),
        ({"multipleOf": 10**12}, "multipleOf"),
        ({"multipleOf": 0.30000000000000004}, "multipleOf"),
        ({"multipleOf": 1e-300}, "multipleOf"),
        ({"type": "integer", "allOf": [{"multipleOf": 65536}, {"multipleOf": 65537}]}, "multipleOf"),
        ({"allOf": [{"multipleOf": 0.01}, {"multipleOf": 50000000}]}, "multipleOf"),
    ],
)
def test_a_number_that_would_be_another_one_is_refused_by_name_or_left_out(schema: Any, keyword: str) -> None:
    with pytest.raises(GrammarError, match=f"^{keyword}: "):
        write_json(schema, strict=True)
    lenient = make_grammar(write_json(schema, strict=False))
    assert f'"{keyword}"' not in lenient
    assert matches(lenient, "5")


@pytest.mark.parametrize("value", [-(2**63), -(2**63) + 1, -1e300])
@pytest.mark.parametrize("strict", [True, False])
def test_the_least_integer_does_not_end_the_process(value: float, strict: bool) -> None:
    """The library would call itself without end: a segmentation fault."""
    for schema in (
        {"const": value},
        {"type": "integer", "enum": [value]},
        {"allOf": [{"type": "integer", "minimum": value}, {"maximum": value}]},
        {"type": "integer", "minimum": value, "exclusiveMaximum": value + 1},
    ):
        try:
            make_vocabulary().check(make_grammar(write_json(schema, strict=strict)))
        except GrammarError:
            assert strict


def test_integers_that_are_taken_are_themselves() -> None:
    rng, vocabulary, tokenizer = random.Random(0), make_vocabulary(), load_tokenizer()
    for _ in range(200):
        value = rng.randrange(-(2**63), 2**63) >> rng.randrange(64)
        try:
            matcher = vocabulary.compile(compile_strictly({"const": value}))
        except GrammarError:
            assert abs(value) > 2**53
            continue
        ids = tokenizer.encode(str(value), False)
        assert matcher.try_consume_tokens(ids) == len(ids)
        assert matcher.is_accepting()
