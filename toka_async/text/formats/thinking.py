"""Reasoning between tags at an answer's start: `<think>` of Qwen3, DeepSeek-R1 and others, `[THINK]` of Magistral."""

from __future__ import annotations

from toka_async.text.formats.format import Format
from toka_async.text.formats.output_grammar import Thought

THINK = Format(
    name="think",
    signs=(("<think>",), ("</think>",)),
    fields={"reasoning_content": {"open": "<think>", "close": "</think>", "at_start": True}, "content": {}},
    thought=Thought("<think>", "</think>"),
)
MISTRAL_THINK = Format(
    name="mistral",
    signs=(("[THINK]",),),
    fields={"reasoning_content": {"open": "[THINK]", "close": "[/THINK]", "at_start": True}, "content": {}},
    thought=Thought("[THINK]", "[/THINK]"),
)
