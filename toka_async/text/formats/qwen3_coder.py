"""Qwen3-Coder's format, which Qwen3.5 writes too: arguments as tags of plain text, whose types the tool's schema says.

One line feed after a parameter's tag and one before its end are no part of the value.
"""

from __future__ import annotations

from toka_async.text.formats.format import Format

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
)
