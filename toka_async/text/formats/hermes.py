"""Hermes' format: JSON in `<tool_call>`. Qwen2.5 and Qwen3 write it too."""

from __future__ import annotations

from toka_async.text.formats.format import Format
from toka_async.text.formats.output_grammar import write_hermes_calls

HERMES = Format(
    name="hermes",
    signs=(("<tool_call>", '"arguments"'),),
    fields={
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {},
    },
    write_calls=write_hermes_calls,
)
