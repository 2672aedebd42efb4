from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cases.grammars import END_IDS, MARKS, accepts, load_marked
from toka_async.openai.errors import ApiError
from toka_async.openai.structural_tags import write_structural_tag

pytest.importorskip("llguidance")

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
JSON: dict[str, Any] = {"type": "json_schema", "json_schema": SCHEMA}
TEXT = {"type": "any_text"}
F = {"type": "tag", "begin": "<function=f>", "content": JSON, "end": "</function>"}
G = {"type": "tag", "begin": "<function=g>", "content": {"type": "const_string", "value": "x"}, "end": "</function>"}
CALL, OTHER = '<function=f>{"a": 1}</function>', "<function=g>x</function>"
MARKED = {"type": "tag", "begin": "<tool_call>\n", "content": JSON, "end": "\n</tool_call>"}
MARKED_CALL = '<tool_call>\n{"a": 1}\n</tool_call>'


def write(wish: Any) -> str:
    return write_structural_tag(wish, "p", load_marked()[0].marks, END_IDS)


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def tag(begin: Any, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def triggered(*tags: Any, triggers: Any = ("<function=",), **more: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": list(triggers), "tags": list(tags), **more}


def separated(**more: Any) -> dict[str, Any]:
    return {"type": "tags_with_separator", "tags": [F, G], "separator": ", ", **more}


THOUGHT = {"type": "sequence", "elements": [tag("<think>", TEXT, "</think>"), triggered(F)]}
TOKEN = {"type": "token", "token": "<think>"}


@pytest.mark.parametrize(
    ("format", "good", "bad"),
    [
        (const("a<think>b"), ["a<think>b"], ["ab", "a"]),
        (JSON, ['{"a": 1}'], ["{}", '{"a": 1}x']),
        ({"type": "regex", "pattern": "[ab]/c+"}, ["a/cc"], ["c/c"]),
        ({"type": "grammar", "grammar": 'root ::= "x" | "y"'}, ["x", "y"], ["xy"]),
        (TEXT, ["", "what<think>ever"], []),
        ({**TEXT, "excludes": ["no"], "max_chars": 5}, ["never", ""], ["a no", "longer"]),
        ({**TEXT, "max_tokens": 2}, ["77"], ["777"]),
        ({"type": "any_tokens", "exclude_tokens": ["<think>"]}, ["a</think>"], ["a<think>"]),
        (TOKEN, ["<think>"], ["<", "</think>"]),
        ({"type": "exclude_token", "exclude_tokens": ["<think>"]}, ["</think>", "7"], ["<think>", "77"]),
        ({"type": "sequence", "elements": [const("a"), JSON, TEXT]}, ['a{"a": 1}more'], ["a", 'b{"a": 1}']),
        ({"type": "or", "elements": [const("a"), JSON]}, ["a", '{"a": 1}'], ["b"]),
        ({"type": "optional", "content": const("a")}, ["", "a"], ["aa"]),
        ({"type": "plus", "content": const("a")}, ["a", "aa"], [""]),
        ({"type": "star", "content": const("a")}, ["", "aaa"], ["b"]),
        ({"type": "repeat", "min": 1, "max": 2, "content": const("a")}, ["a", "aa"], ["", "aaa"]),
        ({"type": "repeat", "min": 2, "max": -1, "content": const("a")}, ["aaa"], ["a"]),
        (F, [CALL], ["<function=f>{}</function>", "x" + CALL]),
        (tag("(", TEXT, [")", "]"]), ["(a)", "(b]", "()"], ["(a", "(a)b"]),
        (tag("<think>", {**TEXT, "max_tokens": 2}, "</think>"), ["<think>77</think>"], ["<think>777</think>"]),
        (
            tag(TOKEN, {"type": "any_tokens"}, {"type": "token", "token": "</think>"}),
            ["<think>a</think>"],
            ["<think>a"],
        ),
        (tag("<think>", {**TEXT, "excludes": ["x"]}, "\n</think>"), ["<think>a\n</think>"], ["<think>x\n</think>"]),
        (tag("(", const("a"), ""), ["(a"], ["(a)"]),
        (tag("(", triggered(F), ")"), ["()", f"(a {CALL} b)"], ["(a", "(<function=f>)"]),
        (
            tag("<think>", triggered(MARKED, triggers=["<tool_call>"]), "</think>"),
            [f"<think>a{MARKED_CALL}b</think>"],
            ["<think>"],
        ),
        (triggered(F, G), ["", "text", f"a {CALL}{OTHER} b"], ["<function=h>", "a <function=g>y</function>"]),
        (triggered(F, G, at_least_one=True), [f"{CALL} b", CALL], ["", f"a {CALL}"]),
        (triggered(F, stop_after_first=True), [f"a {CALL}", "a"], [f"{CALL} b"]),
        (triggered(F, stop_after_first=True, at_least_one=True), [CALL], [f"{CALL} b", "a"]),
        (triggered(F, excludes=["bad"]), [f"a {CALL}"], ["a bad one", f"bad {CALL}"]),
        (triggered(MARKED, triggers=["<tool"]), ["a<think>", f"a{MARKED_CALL}b"], ["<tool_call>b"]),
        (triggered(MARKED, F, triggers=["<tool_call>", "<f"]), [f"a{MARKED_CALL}b{CALL}"], ["<f", "<tool_call>b"]),
        (separated(), ["", f"{CALL}, {OTHER}", CALL], [f"{CALL}{OTHER}", f"{CALL}, "]),
        (separated(at_least_one=True, stop_after_first=True), [CALL], ["", f"{CALL}, {CALL}"]),
        (THOUGHT, [f"<think>hm</think>{CALL}b"], [CALL, "<think>hm"]),
    ],
)
def test_formats(format: dict[str, Any], good: list[str], bad: list[str]) -> None:
    grammar = write({"type": "structural_tag", "format": format})
    assert [text for text in good + bad if accepts(grammar, text)] == good


def test_the_older_form() -> None:
    old = {
        "structures": [{"begin": "<function=f>", "schema": SCHEMA, "end": "</function>"}],
        "triggers": ["<function="],
    }
    new = write({"format": triggered(F)})
    assert write(old) == write(json.dumps({**old, "type": "structural_tag"})) == new


@pytest.mark.parametrize(
    ("wish", "word"),
    [
        ("{", "truncated"),
        ([], "object"),
        ({}, "format"),
        ({"format": {"type": "dispatch", "rules": []}}, "dispatch"),
        ({"format": {**JSON, "style": "qwen_xml"}}, "style"),
        ({"format": {**JSON, "any_order": True}}, "any_order"),
        ({"format": {"type": "json_schema", "json_schema": {"const": 2**53 + 1}}}, "const"),
        ({"format": {**TEXT, "more": 1}}, "more"),
        ({"format": {"type": "sequence", "elements": [TEXT, F]}}, "last part"),
        ({"format": {"type": "star", "content": triggered(F)}}, "last part"),
        ({"format": tag("(", {**TEXT, "max_tokens": 3}, ")")}, "max_tokens"),
        ({"format": tag("(", {"type": "any_tokens"}, ")")}, "special token"),
        ({"format": triggered(F, triggers=["<g"])}, "no trigger"),
        ({"format": triggered(tag(TOKEN, JSON, ""))}, "begin with texts"),
        ({"format": {"type": "token", "token": "<none>"}}, "<none>"),
        ({"format": {"type": "repeat", "min": 2, "max": 1, "content": F}}, "max"),
        ({"format": tag("(", F, ["", ")"])}, "empty"),
        ({"format": {"type": "or", "elements": [{"type": "grammar", "grammar": 'root ::= "x"'}] * 2}}, "one part"),
        ({"structures": [], "triggers": ["a"]}, "structures"),
        ({"structures": [{"begin": "a", "end": "b", "schema": 1}], "triggers": ["a"]}, "schema"),
    ],
)
def test_what_has_no_grammar_is_refused(wish: Any, word: str) -> None:
    with pytest.raises(ApiError, match="p") as caught:
        write(wish)
    assert word in caught.value.message


def test_a_tree_that_is_nested_too_deeply_is_refused() -> None:
    part: Any = F
    for _ in range(100):
        part = {"type": "optional", "content": part}
    with pytest.raises(ApiError, match="too deeply"):
        write({"format": part})


def test_special_tokens_are_those_of_the_model() -> None:
    assert set(MARKS) < load_marked()[0].marks.keys()
