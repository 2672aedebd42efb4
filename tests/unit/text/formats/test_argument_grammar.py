"""Arguments that are no JSON: what may be written for a schema, and which schemas are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cases.grammars import END_IDS, accepts, load_marked
from tests.cases.tool_calls import make_format, parse
from toka_async.grammars.errors import GrammarError
from toka_async.text.formats.output_grammar import CallRules, GrammarTokens, UnwritableError

pytest.importorskip("llguidance")

CODER = make_format("qwen3_coder")
OBJECT = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
FREE = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in (("a b", "1"), ("c", "</p>"))]


def write(name: str, parameters: dict[str, Any], strict: bool = True) -> str:
    tokens = GrammarTokens(load_marked()[0].backend.token_to_id, frozenset(END_IDS))
    rules = CallRules(schemas={"f": (parameters, strict)}, several=False)
    return make_format(name).write_answer(tokens, "x", content="", calls=rules, budget=None)


def of(schema: Any, **more: Any) -> dict[str, Any]:
    return {"properties": {"x": schema}, "required": ["x"], "$defs": {"object": OBJECT}, **more}


def tagged(body: str) -> str:
    return f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, 'a "b"\n {c} 5', 'a "b"\n {c} 5'),
        ({"type": "string"}, "", ""),
        ({"type": "string"}, "\n", "\n"),
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, "a</parameter>", ...),
        ({"type": "string"}, "a</function>", ...),
        ({"type": "string", "maxLength": 2}, "abc", ...),
        ({"type": "string", "minLength": 2}, "a", ...),
        ({"type": "string", "pattern": "b$"}, "ab", "ab"),
        ({"type": "string", "pattern": "b$"}, "ba", ...),
        ({"type": "string", "format": "date"}, "2026-02-30", "2026-02-30"),
        ({"type": "string", "format": "date"}, "2026-2-30", ...),
        ({}, "anything", "anything"),
        ({"type": "integer"}, "-5", -5),
        ({"type": "integer"}, "five", ...),
        ({"type": ["string", "integer"]}, "5", 5),
        ({"anyOf": [{"type": "integer", "minimum": -3, "maximum": 4}, {"type": "string"}]}, "-2", -2),
        ({"anyOf": [{"type": "integer", "minimum": -3, "maximum": 4}, {"type": "string"}]}, "5", ...),
        ({"anyOf": [{"type": "integer", "minimum": -3, "maximum": 4}, {"type": "string"}]}, "5a", "5a"),
        ({"type": ["string", "number"]}, "-1.5", -1.5),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"], "maxLength": 1}, "None", ...),
        ({"type": ["string", "boolean"]}, "TRUE", ...),
        ({"type": ["integer", "boolean"]}, "1", 1),
        ({"$ref": "#/$defs/object"}, '{"n": 1}', {"n": 1}),
        ({"anyOf": [{"$ref": "#/$defs/object"}, {"type": "string"}]}, '{"n": 1}', {"n": 1}),
        ({"anyOf": [{"$ref": "#/$defs/object"}, {"type": "string"}]}, '{"n": "a"}', ...),
        ({"type": "array", "items": {"$ref": "#/$defs/object"}}, '[{"n": 1}]', [{"n": 1}]),
        ({"enum": ["a", 2, None]}, "2", 2),
        ({"enum": ["a", 2, None]}, "a", "a"),
        ({"enum": ["a", 2, None]}, "b", ...),
        ({"type": "string", "enum": ["2"]}, "2", "2"),
        ({"const": [1]}, "[1]", [1]),
        ({"type": "boolean"}, "true", True),
    ],
)
def test_arguments_of_plain_text(schema: dict[str, Any], text: str, value: Any) -> None:
    """What is allowed is read as the value; `...`: it is not allowed."""
    parameters, answer = of(schema), tagged(f"<parameter=x>\n{text}\n</parameter>\n")
    assert accepts(write("qwen3_coder", parameters), answer) == (value is not ...)
    if value is not ...:
        known = {"f": {"x": {**schema, **({"type": "object"} if "$ref" in schema else {})}}}
        if "object" in json.dumps(schema.get("anyOf", "")):
            known = {"f": {"x": {"anyOf": [{"type": "object"}, {"type": "string"}]}}}
        (call,) = parse(CODER, answer, known).calls
        assert json.loads(call.arguments) == {"x": value}


@pytest.mark.parametrize(
    ("parameters", "bodies"),
    [({}, ["", FREE[0], "".join(FREE)]), ({"type": "object", "additionalProperties": False}, [""])],
)
def test_functions_that_name_no_arguments(parameters: dict[str, Any], bodies: list[str]) -> None:
    grammar = write("qwen3_coder", parameters)
    assert [each for each in ("", FREE[0], "".join(FREE)) if accepts(grammar, tagged(each))] == bodies


@pytest.mark.parametrize("text", ["", "b=1", "a=1, b=2", "b=1, c=None", "a=True, b=1, c=False"])
def test_arguments_of_python(text: str) -> None:
    """Those that are not required may be missing, each of them."""
    properties = {"a": {"type": ["integer", "boolean"]}, "b": {"type": "integer"}, "c": {"type": ["boolean", "null"]}}
    grammar = write("pythonic", {"properties": properties, "required": ["b"]})
    assert accepts(grammar, f"[f({text})]") == ("b=" in text)
    assert not accepts(grammar, f"[f({text}, )]")
    assert accepts(write("pythonic", {"properties": properties}), f"[f({text})]")


@pytest.mark.parametrize(
    ("name", "parameters", "word"),
    [
        ("qwen3_coder", of({"type": "string"}, minProperties=1), "minProperties"),
        ("qwen3_coder", {"additionalProperties": {"type": "integer"}}, "additionalProperties"),
        ("qwen3_coder", of({"type": "string", "format": "hostname"}), "hostname"),
        ("qwen3_coder", of({"type": "string", "contentEncoding": "base64"}), "contentEncoding"),
        ("qwen3_coder", of({"type": "string", "pattern": "^a|b$"}), "pattern"),
        ("qwen3_coder", of({"type": "string", "pattern": "(?=a)"}), "pattern"),
        ("qwen3_coder", of({"oneOf": [{"type": "string"}, {"const": "a"}]}), "oneOf"),
        ("qwen3_coder", of({"anyOf": [{"type": "string"}, {"type": "null"}], "not": {}}), "anyOf"),
        ("qwen3_coder", of({"enum": ["null", None]}), "null"),
        ("qwen3_coder", of({"anyOf": [{"type": "string"}, {"type": "integer", "maximum": 5}]}), "maximum"),
        ("pythonic", of({"type": "string"}, minProperties=1), "minProperties"),
        ("pythonic", of({"oneOf": [{"type": "boolean"}, {"const": True}]}), "oneOf"),
    ],
)
def test_what_cannot_be_enforced_is_refused_under_strict_and_else_left_out(
    name: str, parameters: dict[str, Any], word: str
) -> None:
    with pytest.raises(UnwritableError, match=word):
        write(name, parameters)
    load_marked()[1].check(write(name, parameters, strict=False))


@pytest.mark.parametrize("name", ["pythonic", "qwen3_coder"])
def test_values_of_another_type_than_the_schemas_are_left_out_unless_it_is_strict(name: str) -> None:
    parameters = of({"type": "array", "items": {"type": "string"}, "enum": ["a"]})
    text = '[f(x=["b"])]' if name == "pythonic" else tagged('<parameter=x>\n["b"]\n</parameter>\n')
    assert accepts(write(name, parameters, strict=False), text)
    with pytest.raises(GrammarError):
        load_marked()[1].check(write(name, parameters))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("pythonic", {"properties": {"not-python": {}}}),
        ("qwen3_coder", {"properties": {"a>b": {}}}),
        ("qwen3_coder", of(False)),
    ],
)
def test_what_the_format_cannot_write_is_refused(name: str, parameters: dict[str, Any]) -> None:
    with pytest.raises(UnwritableError):
        write(name, parameters, strict=False)
