from __future__ import annotations

from typing import Any

import pytest

from tests.cases.grammars import matches
from toka_async.openai import structured
from toka_async.openai.errors import ApiError
from toka_async.openai.parse import parse_fields
from toka_async.openai.requests import CompletionRequest
from toka_async.openai.structured import MAX_GRAMMAR, OutputGrammar, close_objects, find_grammar

LIST = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}


def find(**fields: Any) -> OutputGrammar:
    return find_grammar(parse_fields({"prompt": "x", **fields}, CompletionRequest))


def refuse(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        find(**fields)
    return caught.value


def test_nothing_is_asked_for() -> None:
    assert find() == find(response_format={"type": "text"}) == find(structured_outputs=None) == OutputGrammar()


@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a": [1]}', "[1]"),
        ({"structured_outputs": {"json_object": True}}, "{}", "1"),
        ({"structured_outputs": {"json": {"type": "integer"}}}, "17", '"a"'),
        ({"structured_outputs": {"json": '{"type": "integer"}'}}, "17", '"a"'),
        ({"structured_outputs": {"regex": "a+"}}, "aaa", "b"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "b", "c"),
        ({"structured_outputs": {"grammar": 'root ::= "x"'}}, "x", "y"),
        ({"guided_json": {"const": [1, 2]}}, "[1, 2]", "[1]"),
        ({"guided_json": {"const": [1, 2]}, "guided_whitespace_pattern": "_?"}, "[1,_2]", "[1, 2]"),
        ({"structured_outputs": {"json": {"const": [1, 2]}, "disable_any_whitespace": True}}, "[1,2]", "[1, 2]"),
        ({"structured_outputs": {"json": {"const": [1, 2]}, "whitespace_pattern": "-?"}}, "[1,-2]", "[1, 2]"),
        ({"json_schema": '{"type": "null"}'}, "null", "0"),
        ({"regex": "[0-9]{2}"}, "42", "4"),
        ({"ebnf": "root ::= [a-c]+"}, "abc", "d"),
    ],
)
def test_each_field_makes_its_grammar(fields: dict[str, Any], right: str, wrong: str) -> None:
    grammar = find(**fields)
    assert grammar.param == next(iter(fields))
    assert matches(grammar.text, right)
    assert not matches(grammar.text, wrong)


def test_only_openais_field_is_lenient_and_only_without_strict() -> None:
    def ask(**more: Any) -> str:
        return find(response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": LIST, **more}}).text

    assert matches(ask(), "[1,1]")
    assert '"lenient": false' in ask(strict=True)
    looking = {"type": "string", "pattern": "^(?=x).*$"}
    assert matches(ask(schema=looking), '"a"')
    assert "pattern" in refuse(guided_json=looking).message
    assert '"lenient": false' in find(guided_json=LIST).text
    assert matches(find(guided_json={**LIST, "x-guidance": {"lenient": True}}).text, "[1,1]")


def test_objects_are_closed_only_where_they_name_properties() -> None:
    schema = {"properties": {"a": {"type": "object"}, "b": {"properties": {}, "additionalProperties": True}}}
    closed = close_objects(schema)
    assert closed["additionalProperties"] is False
    assert "additionalProperties" not in closed["properties"]["a"]
    assert closed["properties"]["b"]["additionalProperties"] is True
    assert close_objects({"const": {"properties": 1}}) == {"const": {"properties": 1}}


@pytest.mark.parametrize("name", ["default", "const", "enum", "examples"])
def test_properties_may_be_named_as_keywords_are(name: str) -> None:
    bounded = {"type": "object", "properties": {name: {"type": "integer", "minimum": 2**53 + 1}}}
    assert "minimum" in refuse(guided_json=bounded).message
    assert "minimum" in refuse(guided_json={"$defs": bounded["properties"], "$ref": f"#/$defs/{name}"}).message
    inner = {"type": "object", "properties": {"a": {"type": "integer"}}}
    schema = {"type": "object", "properties": {name: inner}}
    text = find(structured_outputs={"json": schema, "disable_additional_properties": True}).text
    assert matches(text, f'{{"{name}": {{"a": 1}}}}')
    assert not matches(text, f'{{"{name}": {{"b": 1}}}}')


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True}}},
            "response_format.json_schema.schema",
        ),
        ({"guided_json": False}, "guided_json"),
        ({"structured_outputs": {"grammar": 'start: %json {"const": -1e30}'}}, "structured_outputs.grammar"),
        ({"guided_json": {"type": "string", "pattern": "(?i)a"}}, "guided_json"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"guided_json": [1]}, "guided_json"),
        ({"guided_grammar": "root ::= ((("}, "guided_grammar"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"json_schema": {"minimum": 10**30}}, "json_schema"),
        ({"guided_json": {"properties": {"a": {"anyOf": [{"minimum": 2**53 + 1}]}}}}, "guided_json"),
        ({"structured_outputs": {"json": {"items": {"exclusiveMaximum": -(2**63) - 1}}}}, "structured_outputs.json"),
        ({"regex": "a\\\\\\"}, "regex"),
        ({"structured_outputs": {"regex": "\\"}}, "structured_outputs.regex"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"regex": "a", "guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}},
            "structured_outputs.whitespace_pattern",
        ),
        (
            {"structured_outputs": {"choice": ["a"], "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
        ),
        (
            {"structured_outputs": {"json_object": True, "disable_additional_properties": True}},
            "structured_outputs.disable_additional_properties",
        ),
        ({"response_format": {"type": "text", "json_schema": {"name": "n"}}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object", "triggers": ["a"]}}, "response_format.triggers"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"regex": "a", "allowed_token_ids": [5]}, "allowed_token_ids"),
        ({"regex": "a" * (MAX_GRAMMAR + 1)}, "regex"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    error = refuse(**fields)
    assert (error.status, error.param) == (400, param)


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured, "is_installed", lambda: False)
    error = refuse(regex="a")
    assert (error.status, error.param) == (501, "regex")
    assert "toka-async[structured]" in error.message
