from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers

from tests.cases.tokenizers import NAMES, byte_level
from tests.cases.tool_calls import parse
from toka_async.grammars.lark import make_grammar, write_json
from toka_async.text.formats.choice import ResponseFormat, choose_format
from toka_async.text.tokenizer import Tokenizer

llguidance = pytest.importorskip("llguidance")

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
SCHEMAS = {"f": (SCHEMA, True), "g": ({}, False)}
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]"]


def marked() -> Tokenizer:
    """With tokens for what marks calls and thoughts."""
    backend = tokenizers.Tokenizer.from_str(byte_level().backend.to_str())
    backend.add_special_tokens(MARKS)
    return Tokenizer(backend, NAMES)


TOKENIZERS = [byte_level(), marked()]


def accepts(tokenizer: Tokenizer, grammar: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer(tokenizer.backend.to_str()), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(text, False)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def made(name: str) -> ResponseFormat:
    format = choose_format("", name, "think")
    assert format is not None
    return format


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
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
    ],
)
def test_a_thought_may_precede_an_output(tokenizer: Tokenizer, written: str, text: str, is_good: bool) -> None:
    grammar = make_grammar(write_json(SCHEMA, strict=True))
    thinking = made("none").write_thought(grammar, tokenizer.backend.token_to_id, written)
    assert accepts(tokenizer, thinking, text) == is_good


F, G = '{"name": "f", "arguments": {"a": 5}}', '{"name": "g", "arguments": {"b": []}}'


@pytest.mark.parametrize(
    ("name", "tokenizer", "one", "two"),
    [
        *(
            ("hermes", each, f"<tool_call>\n{F}\n</tool_call>", f"\n<tool_call>\n{G}\n</tool_call>")
            for each in TOKENIZERS
        ),
        ("mistral", TOKENIZERS[0], f"[TOOL_CALLS][{F}", f", {G}]"),
        ("mistral", TOKENIZERS[1], '[TOOL_CALLS]f[ARGS]{"a": 5}', '[TOOL_CALLS]g[ARGS]{"b": []}'),
        ("llama3_json", TOKENIZERS[0], F.replace("arguments", "parameters"), ""),
    ],
)
def test_calls_that_must_be_made(name: str, tokenizer: Tokenizer, one: str, two: str) -> None:
    """What the grammar accepts, the parser reads."""
    format, find_token = made(name), tokenizer.backend.token_to_id
    assert format.calls is not None
    assert format.calls.write_calls is not None
    several = format.calls.write_calls(SCHEMAS, find_token, several=True)
    single = format.calls.write_calls(SCHEMAS, find_token, several=False)
    whole = one + two
    tools: dict[str, Any] = {each: {} for each in SCHEMAS}
    assert accepts(tokenizer, several, whole)
    assert accepts(tokenizer, single, whole) == (not two)
    calls = [(call.name, json.loads(call.arguments)) for call in parse(format, whole, tools).calls]
    assert calls == [("f", {"a": 5}), ("g", {"b": []})][: 2 if two else 1]
    for wrong in ("", "text", whole.replace('"a": 5', '"a": "x"'), whole.replace('"a"', '"c"'), f"text {whole}"):
        assert not accepts(tokenizer, several, wrong), wrong
