"""gpt-oss' format, harmony: messages in channels, whose headers name the channel and the recipient.

The recipient may stand in the channel's header or, as gpt-oss also writes it, before the channel.
"""

from __future__ import annotations

from toka_async.text.formats.format import Format

ENDS = ["<|end|>", "<|return|>", "<|call|>"]
AUTHOR = r"(?:<\|start\|>assistant)?"
CONSTRAIN = r"[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>"
CHANNEL = r"<\|channel\|>(?:commentary|analysis)"

HARMONY = Format(
    name="harmony",
    signs=(("<|channel|>", "<|message|>"),),
    fields={
        "reasoning_content": {"open_pattern": rf"{AUTHOR}<\|channel\|>analysis<\|message\|>", "close": ENDS},
        "tool_calls": {
            "open_pattern": rf"{AUTHOR}(?:{CHANNEL})? to=functions\.(?P<name>[\w-]+)(?:{CHANNEL})?{CONSTRAIN}",
            "close": ENDS,
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {
            "open_pattern": rf"{AUTHOR}<\|channel\|>(?:final|commentary) ?(?:<\|constrain\|>\w*)?<\|message\|>",
            "close": ENDS,
            "repeats": True,
        },
        "other": {},
    },
)
