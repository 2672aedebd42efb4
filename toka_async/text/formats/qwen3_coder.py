"""Qwen3-Coder's format, which Qwen3.5 writes too: arguments as tags of plain text, whose types the tool's schema says.

One line feed after a parameter's tag and one before its end are no part of the value.
"""

from __future__ import annotations

import re

from toka_async.grammars.lark import write_text
from toka_async.text.formats.argument_grammar import TextArguments, read_function
from toka_async.text.formats.format import Format
from toka_async.text.formats.output_grammar import CallRules, GrammarTokens, UnwritableError, write_marked_calls

OPEN, CLOSE = "<tool_call>", "</tool_call>"
END = "\n</parameter>\n"
UNSAFE = r"<\/(parameter|function|tool_call)>"  # what a text would end with too early
KEY = re.compile(r"[^>\n]+")


def write_calls(rules: CallRules, tokens: GrammarTokens) -> str:
    """The functions' arguments in the order of their schemas. Raises UnwritableError."""
    values = TextArguments(UNSAFE, END)
    calls = []
    for name, (schema, strict) in rules.schemas.items():
        function = read_function(schema, strict)
        parts = [write_text(f"\n<function={name}>\n")]
        for argument in function.arguments:
            if not KEY.fullmatch(argument.name):
                raise UnwritableError(f"an argument {argument.name!r} cannot be written in the model's format")
            opening = write_text(f"<parameter={argument.name}>\n")
            one = f"{opening} {values.write(argument.schema, function)}"
            parts.append(one if argument.is_required else f"({one})?")
        if function.has_others:
            parts.append(values.write_others("<parameter=", r"[^>\n<]+", ">\n"))
        calls.append(" ".join(parts))
    call = f'({" | ".join(calls)}) "</function>\\n" {tokens.write_mark(CLOSE)}'
    return write_marked_calls(OPEN, call, rules, tokens, between='"\\n"') + values.write_terminals()


QWEN3_CODER = Format(
    name="qwen3_coder",
    signs=(("<function=", "<parameter="),),
    fields={
        "tool_calls": {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>(?=\s*(?:<parameter=|\Z))",
            },
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {},
    },
    write_calls=write_calls,
)
