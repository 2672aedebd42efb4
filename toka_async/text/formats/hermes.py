"""Hermes' format: JSON in `<tool_call>`. Qwen2.5 and Qwen3 write it too."""

from __future__ import annotations

from toka_async.text.formats.format import Format
from toka_async.text.formats.output_grammar import CallRules, GrammarTokens, write_call, write_marked_calls

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def write_calls(rules: CallRules, tokens: GrammarTokens) -> str:
    calls = " | ".join(write_call(name, *schema, "arguments") for name, schema in rules.schemas.items())
    return write_marked_calls(OPEN, f'"\\n" ({calls}) "\\n" {tokens.write_mark(CLOSE)}', rules, tokens, between='"\\n"')


HERMES = Format(
    name="hermes",
    signs=(("<tool_call>", '"arguments"'),),
    fields={
        "tool_calls": {
            "open": OPEN,
            "close": CLOSE,
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {},
    },
    write_calls=write_calls,
)
