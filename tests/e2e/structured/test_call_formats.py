"""Calls by grammar in every format through whole servers: random models whose every call is valid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.cases.grammars import TIGHT
from tests.cases.marked_model import write_marked_model
from tests.processes.serving import serving
from toka_async.text.tokenizer import Tokenizer

TEXT = {"type": "string", "maxLength": 5}
ORDER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": TEXT,
        "code": {"type": "string", "pattern": "^[A-C]{2}[0-9]$"},
        "count": {"type": "integer", "minimum": -20, "maximum": 20},
        "flag": {"type": "boolean"},
        "maybe": {"type": ["string", "null"], "maxLength": 3},
        "word": {"enum": ["new", "5", None]},
        "list": {"type": "array", "items": {"$ref": "#/$defs/part"}, "maxItems": 2},
    },
    "required": ["code", "flag", "maybe", "word"],
    "additionalProperties": False,
    "$defs": {
        "part": {
            "type": "object",
            "properties": {"size": {"type": "integer", "minimum": 0, "maximum": 9}, "name": TEXT},
            "required": ["size"],
            "additionalProperties": False,
        }
    },
    "x-guidance": TIGHT,
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False, "x-guidance": TIGHT}
SCHEMAS = {"order": ORDER, "stop": NOTHING}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "strict": name == "order", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
TEMPLATE = "{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[0].content }}"
THINKING = ("<think>", "</think>")
FORMATS = {
    "hermes": ("think", ("<tool_call>", "</tool_call>", *THINKING), "<tool_call>"),
    "qwen3_coder": ("think", ("<tool_call>", "</tool_call>", *THINKING), "<tool_call>"),
    "llama3_json": ("think", ("<|python_tag|>", *THINKING), "{"),
    "pythonic": ("think", ("<|python_start|>", "<|python_end|>", *THINKING), "["),
    "mistral": ("mistral", ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"), "[TOOL_CALLS]"),
    "harmony": ("harmony", ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>"), " to"),
}
NAMED = {"type": "function", "function": {"name": "order"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_a_thousand_calls_are_valid(name: str, tmp_path: Path) -> None:
    reasoning, marks, opening = FORMATS[name]
    prompt = "<|start|>assistant" if name == "harmony" else "Answer:"
    path = write_marked_model(tmp_path, TEMPLATE + prompt, marks)
    begin = str(Tokenizer.load(path).encode(opening, False)[0])
    formats = [f"model.tool_format={name}", f"model.reasoning_format={reasoning}"]
    num_calls = 0
    with serving(tmp_path, f"model.path={path}", *formats) as server:
        for place in range(40):
            # Where the model may choose, the bias lets it begin as a call does.
            choice: Any = ("required", NAMED, ALLOWED, "auto")[place % 4]
            free = {"logit_bias": {begin: 100}} if choice == "auto" else {}
            body = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": choice == "required", **free}
            body |= {"n": 26, "max_tokens": 900, "seed": place}
            messages = [{"role": "user", "content": f"Question: {place}?"}]
            status, answer = server.post(
                "/v1/chat/completions", messages=messages, thinking_token_budget=8, temperature=1.0, **body
            )
            assert status == 200, answer
            for each in answer["choices"]:
                if each["finish_reason"] == "length":  # of more calls than there is room for
                    assert choice == "required"
                    continue
                assert each["finish_reason"] == "tool_calls", each
                for call in each["message"]["tool_calls"]:
                    function = call["function"]
                    assert choice in ("required", "auto") or function["name"] == "order"
                    jsonschema.validate(json.loads(function["arguments"]), SCHEMAS[function["name"]])
                num_calls += 1
    assert num_calls >= 1000
