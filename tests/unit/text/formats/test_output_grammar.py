"""Grammars of whole answers: what they accept, and that the parser reads what they accept as it should."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from tests.cases.grammars import END_IDS, MARKS, TIGHT, accepts, load_marked, write_random
from tests.cases.tool_calls import PROMPTS, parse
from toka_async.grammars.lark import make_grammar, write_json
from toka_async.text.formats.choice import ResponseFormat, choose_format
from toka_async.text.formats.output_grammar import CallRules, GrammarTokens, UnwritableError

pytest.importorskip("llguidance")

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
SCHEMAS: Any = {"f": (SCHEMA, True), "g": ({}, False)}
NONE: tuple[str, ...] = ()
FORMATS = ["hermes", "qwen3_coder", "llama3_json", "pythonic", "mistral", "harmony"]


def made(name: str, reasoning: str = "think") -> ResponseFormat:
    format = choose_format("", name, "harmony" if name == "harmony" else reasoning)
    assert format is not None
    return format


def tokens_of(marks: tuple[str, ...]) -> GrammarTokens:
    return GrammarTokens(load_marked(marks)[0].backend.token_to_id, frozenset(END_IDS))


def write(
    name: str,
    marks: tuple[str, ...] = MARKS,
    *,
    written: str = "",
    content: str = "",
    calls: CallRules | None = None,
    budget: int | None = None,
) -> str:
    return made(name).write_answer(tokens_of(marks), written, content=content, calls=calls, budget=budget)


CONTENT = make_grammar(write_json(SCHEMA, strict=True))


@pytest.mark.parametrize("marks", [NONE, MARKS])
@pytest.mark.parametrize(
    ("written", "text", "is_good"),
    [
        ("", '{"a": 1}', True),
        ("", '<think>hm\n</think>\n\n{"a": 1}', True),
        ("", 'hm {"a": 1}', False),
        ("<think>\n", 'hm\n</think>\n\n{"a": 1}', True),
        ("<think>\n", '{"a": 1}', False),
        ("<think>\n\n</think>\n\n", '{"a": 1}', True),
        ("<think>\n\n</think>\n\n", 'hm</think>{"a": 1}', False),
        ("It is ", '{"a": 1}', True),
        ("It is ", '<think>hm</think>{"a": 1}', False),
    ],
)
def test_a_thought_may_precede_an_output(marks: tuple[str, ...], written: str, text: str, is_good: bool) -> None:
    assert accepts(write("none", marks, written=written, content=CONTENT), text, marks) == is_good


F, G = '{"name": "f", "arguments": {"a": 5}}', '{"name": "g", "arguments": {}}'
ANALYSIS = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant"
HEAD = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
XML = "<tool_call>\n<function=f>\n<parameter=a>\n5\n</parameter>\n</function>\n</tool_call>"
WRITTEN = [
    ("hermes", NONE, f"<tool_call>\n{F}\n</tool_call>", f"\n<tool_call>\n{G}\n</tool_call>"),
    ("hermes", MARKS, f"<tool_call>\n{F}\n</tool_call>", f"\n<tool_call>\n{G}\n</tool_call>"),
    ("qwen3_coder", NONE, XML, "\n<tool_call>\n<function=g>\n</function>\n</tool_call>"),
    ("qwen3_coder", MARKS, XML, "\n<tool_call>\n<function=g>\n</function>\n</tool_call>"),
    ("mistral", NONE, f"[TOOL_CALLS][{F}", f", {G}]"),
    ("mistral", MARKS, '[TOOL_CALLS]f[ARGS]{"a": 5}', "[TOOL_CALLS]g[ARGS]{}"),
    ("llama3_json", NONE, F.replace("arguments", "parameters"), ""),
    ("llama3_json", MARKS, F.replace("arguments", "parameters"), ""),
    ("pythonic", NONE, "[f(a=5)", ", g()]"),
    ("pythonic", MARKS, "<|python_start|>[f(a=5)", ", g()]<|python_end|>"),
    ("harmony", MARKS, f'{HEAD}{{"a": 5}}', ""),
    ("harmony", MARKS, ' to=functions.f<|channel|>commentary json<|message|>{"a": 5}', ""),
]


@pytest.mark.parametrize(("name", "marks", "one", "two"), WRITTEN)
def test_calls_that_must_be_made(name: str, marks: tuple[str, ...], one: str, two: str) -> None:
    """What the grammar accepts, the parser reads."""
    several, single = (write(name, marks, calls=CallRules(schemas=SCHEMAS, several=each)) for each in (True, False))
    whole = one + two
    tools: dict[str, Any] = {"f": SCHEMA["properties"], "g": {}}
    assert accepts(several, whole, marks)
    assert accepts(single, whole, marks) == (not two)
    calls = [(call.name, json.loads(call.arguments)) for call in parse(made(name), whole, tools).calls]
    assert calls == [("f", {"a": 5}), ("g", {})][: 2 if two else 1]
    for wrong in ("", "text", whole.replace("5", '"x"'), whole.replace("f", "h", 1), f"text {whole}"):
        assert not accepts(several, wrong, marks), wrong


@pytest.mark.parametrize(("name", "marks", "one", "two"), WRITTEN)
def test_calls_that_may_be_made(name: str, marks: tuple[str, ...], one: str, two: str) -> None:
    """Text is free, and what begins a call is one, of a function that is there, as its schema says."""
    several, single = (
        write(name, marks, calls=CallRules(schemas=SCHEMAS, several=each, is_forced=False)) for each in (True, False)
    )
    whole, is_harmony = one + two, name == "harmony"
    free = ["<|channel|>final<|message|>It is so"] if is_harmony else ["It is so, {you see}", ""]
    before = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" if is_harmony else "I look. "
    has_text = name not in ("llama3_json", "pythonic")
    for text in (*free, whole, *([before + whole] if has_text else [])):
        assert accepts(several, text, marks), text
    assert accepts(single, whole, marks) == (not two)
    for wrong in (whole.replace("5", '"x"'), whole.replace("f", "h", 1), whole[:-1] + "!"):
        assert not accepts(several, wrong, marks), wrong
    thought = ANALYSIS.format("hm") if is_harmony else "<think>hm</think>"
    if has_text or marks:
        assert accepts(several, thought + whole, marks)


@pytest.mark.parametrize("name", ["hermes", "harmony"])
def test_content_of_a_grammar_may_stand_instead_of_calls(name: str) -> None:
    grammar = write(name, content=CONTENT, calls=CallRules(schemas=SCHEMAS, several=True, is_forced=False))
    head = "<|channel|>final<|message|>" if name == "harmony" else ""
    call = f'{HEAD}{{"a": 5}}' if name == "harmony" else f"<tool_call>\n{F}\n</tool_call>"
    for text, is_good in ((f'{head}{{"a": 5}}', True), (call, True), (f"{head}text", False)):
        assert accepts(grammar, text) == is_good, text


def test_content_of_harmony_has_its_header() -> None:
    grammar = write("harmony", content=CONTENT)
    for text in (
        '<|channel|>final<|message|>{"a": 1}',
        f'{ANALYSIS.format("hm")}<|channel|>final <|constrain|>json<|message|>{{"a": 1}}',
    ):
        assert accepts(grammar, text)
        assert parse(made("harmony"), text, {}, prompt=PROMPTS["harmony"]).content == '{"a": 1}'
    assert not accepts(grammar, '{"a": 1}')
    begun = write("harmony", content=CONTENT, written="<|channel|>final<|message|>")
    assert accepts(begun, '{"a": 1}')


@pytest.mark.parametrize(
    ("name", "written", "text", "good", "bad"),
    [
        ("none", "<think>\n", "{}</think>\n\nand so on, <tool_call>{{", [0, 1, 3], [4]),
        ("none", "", "<think>{}</think>and so on", [0, 3], [4]),
        ("none", "", "no {} thought", [9], []),
        ("none", "", "no {} <think>", [], [0]),
        ("hermes", "<think>\n", "{}</think>\n\n{{", [3], [4]),
        (
            "harmony",
            "",
            "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>x",
            [3],
            [4],
        ),
        ("harmony", "", "<|channel|>final<|message|>x{}<|end|><|start|>assistant<|channel|>analysis", [], [0]),
    ],
)
def test_a_budget_of_thinking_tokens(name: str, written: str, text: str, good: list[int], bad: list[int]) -> None:
    """Of three tokens, after which the thought's end is all that is allowed. What follows is free."""
    grammar = write(name, written=written, budget=3)
    for count in (*good, *bad):
        assert accepts(grammar, text.format("7" * count)) == (count in good), count  # a digit is a token


def test_a_budget_may_be_nothing_or_huge() -> None:
    assert accepts(write("none", written="<think>\n", budget=0), "</think>yes")
    assert not accepts(write("none", written="<think>\n", budget=0), "7</think>yes")
    assert accepts(write("none", written="<think>\n", budget=2**31 - 1), "7" * 90 + "</think>yes")
    assert write("none", written="<think>\n\n</think>\n\n", budget=3) == ""


def test_what_cannot_be_written_is_refused() -> None:
    with pytest.raises(UnwritableError, match="</think> is not one token"):
        write("none", NONE, budget=3)
    with pytest.raises(UnwritableError, match="no thoughts"):
        made("hermes", "none").write_answer(tokens_of(MARKS), "", content="", calls=None, budget=3)
    with pytest.raises(UnwritableError, match="all of the format's tokens"):
        write("harmony", NONE, calls=CallRules(schemas=SCHEMAS, several=False))
    with pytest.raises(UnwritableError, match="white space"):
        write("hermes", calls=CallRules(schemas={"f": (SCHEMA, True), "g": (RICH, True)}, several=False))


TEXT = {"type": "string", "maxLength": 6}
INTEGER = {"type": "integer", "minimum": -20, "maximum": 20}
ITEMS: dict[str, Any] = {
    "text": TEXT,
    "word": {"enum": ["new", "5", "a b"]},
    "code": {"type": "string", "pattern": "^[A-C]{2}[0-9]$"},
    "found": {"type": "string", "pattern": "x[0-9]", "maxLength": 4},
    "day": {"type": "string", "format": "date"},
    "count": INTEGER,
    "flag": {"type": "boolean"},
    "mixed": {"anyOf": [INTEGER, {**TEXT, "minLength": 2}, {"type": "null"}]},
    "maybe": {"type": ["string", "null"], "maxLength": 3},
    "list": {"type": "array", "items": INTEGER, "maxItems": 2},
    "thing": {"$ref": "#/$defs/thing"},
    "values": {"enum": [1, True, None, "one"]},
}
THING = {"type": "object", "properties": {"b": {"type": "boolean"}, "t": TEXT}, "additionalProperties": False}
RICH: dict[str, Any] = {
    "type": "object",
    "properties": ITEMS,
    "required": ["code", "mixed", "flag", "values"],
    "additionalProperties": False,
    "$defs": {"thing": {**THING, "required": ["b"]}},
    "x-guidance": TIGHT,
}
TOOLS: dict[str, Any] = {"rich": {**ITEMS, "thing": THING}, "plain": {"count": INTEGER}}
PLAIN = {"type": "object", "properties": {"count": INTEGER}, "additionalProperties": False, "x-guidance": TIGHT}


BEGUN = {
    "hermes": "I look.\n<tool_call>",
    "qwen3_coder": "I look.\n<tool_call>",
    "llama3_json": "{",
    "pythonic": "[",
    "mistral": "I look.[TOOL_CALLS]",
    "harmony": "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=",
}


@pytest.mark.parametrize("is_forced", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_random_calls_are_read_and_valid(name: str, is_forced: bool) -> None:
    """The draw of every token is random: what is allowed is a call, and its arguments match its schema."""
    schemas: Any = {"rich": (RICH, True), "plain": (PLAIN, False)}
    rules = CallRules(schemas=schemas, several=False, is_forced=is_forced)
    grammar = write(name, calls=rules, written="" if name == "harmony" else "x")
    for text in write_random(grammar, 8, 1, begun="" if is_forced else BEGUN[name]):
        parsed = parse(made(name), text, TOOLS, prompt=PROMPTS.get(name, ""))
        assert parsed.content == ("" if is_forced or "look" not in BEGUN[name] else "I look.")
        (call,) = parsed.calls
        jsonschema.validate(json.loads(call.arguments), RICH if call.name == "rich" else PLAIN)
