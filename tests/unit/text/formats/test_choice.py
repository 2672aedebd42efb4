from __future__ import annotations

from typing import Any

import pytest

from toka_async.text.formats.choice import ResponseFormat, choose_format
from toka_async.text.formats.template import ResponseTemplateError

QWEN = '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}'
GIVEN = {"start_anchor": "A:", "fields": {"thinking": {"open": "<t>", "close": "</t>"}, "content": {}}}


def names(format: ResponseFormat | None) -> tuple[str | None, str | None]:
    if format is None:
        return None, None
    calls, reasoning = format.calls, format.reasoning
    return None if calls is None else calls.name, None if reasoning is None else reasoning.name


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages }}", (None, None)),
        (QWEN, ("hermes", None)),
        (f"{QWEN} <think>", ("hermes", "think")),
        ("<tool_call>\n<function=f>\n<parameter=x>", ("qwen3_coder", None)),
        ('role == \'ipython\' {"name": f, "parameters": p}', ("llama3_json", None)),
        ("[func_name1(params_name1=value)]", ("pythonic", None)),
        ("[TOOL_CALLS]", ("mistral", None)),
        ("[TOOL_CALLS] [THINK]", ("mistral", "mistral")),
        ("<|start|>assistant<|channel|>analysis<|message|>", ("harmony", "harmony")),
        ("content.split('</think>')[-1]", (None, "think")),
    ],
)
def test_a_chat_template_shows_its_format(template: str, expected: tuple[str | None, str | None]) -> None:
    assert names(choose_format(template, "auto", "auto")) == expected


def test_a_configured_format_precedes() -> None:
    assert names(choose_format(QWEN, "pythonic", "think")) == ("pythonic", "think")
    assert names(choose_format(f"{QWEN}<think>", "none", "auto")) == (None, "think")
    assert choose_format(f"{QWEN}<think>", "none", "none") is None


def test_the_tokenizers_own_response_template() -> None:
    own = choose_format(QWEN, "auto", "auto", GIVEN)
    assert own is not None
    assert (own.has_reasoning, own.has_calls, own.calls) == (True, False, None)
    assert names(choose_format(QWEN, "hermes", "auto", GIVEN)) == ("hermes", None)


@pytest.mark.parametrize("name", ["hermes", "mistral"])
def test_ids_of_calls(name: str) -> None:
    """Mistral's templates refuse ids of another length."""
    made = choose_format("", name, "none")
    assert made is not None
    ids = {made.new_id() for _ in range(100)}
    assert len(ids) == 100
    assert {len(each) for each in ids} == ({9} if name == "mistral" else {29})


def test_markers_are_the_special_tokens_that_the_format_reads() -> None:
    made = choose_format("", "mistral", "mistral")
    assert made is not None
    special = ["<s>", "[INST]", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"]
    assert made.find_markers(special) == {"[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"}


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ([], "an object with 'fields'"),
        ({"fields": {}}, "an object with 'fields'"),
        ({**GIVEN, "more": 1}, "has no 'more'"),
        ({**GIVEN, "version": 2}, "version 2"),
        ({"fields": {"a": {}, "b": {}}}, "several fields have no 'open': a, b"),
        ({"fields": {"a": {"open": "x", "open_pattern": "y"}}}, "both"),
        ({"fields": {"a": {"open": ""}}}, "must not be empty"),
        ({"fields": {"a": {"open_pattern": "("}}}, "no regular expression"),
        ({"fields": {"a": {"open": "x", "content": "yaml"}}}, "no content 'yaml'"),
        ({"fields": {"a": {"open": "x", "content": "calls"}}}, "no content 'calls'"),
        ({"fields": {"a": {"open": "x", "colour": 1}}}, "has no 'colour'"),
        ({"fields": {"a": {"open": "x", "content": "xml-inline"}}}, "key and value"),
        ({"fields": {"a": {"open": "x", "transform": {"n": "is {content}"}}}}, "a whole string"),
    ],
)
def test_malformed_response_templates(template: Any, message: str) -> None:
    with pytest.raises(ResponseTemplateError, match=message):
        choose_format("", "auto", "auto", template)
