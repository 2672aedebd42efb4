"""The format of Llama 3.1 and later: the whole answer is an object with a name and parameters, or several of them."""

from __future__ import annotations

import json
from typing import Any

from toka_async.text.formats.contents import read_json
from toka_async.text.formats.format import Format
from toka_async.text.formats.output_grammar import CallRules, GrammarTokens, write_call, write_leading_calls

TAG = "<|python_tag|>"
KEYS = {"type", "name", "parameters", "arguments"}
DECODER = json.JSONDecoder()


def read_objects(raw: str) -> list[tuple[str, Any]]:
    """Reads calls that a semicolon or white space divides. Raises ValueError for any other text."""
    text, place, calls = raw.strip().removeprefix(TAG).strip(), 0, []
    while place < len(text):
        try:
            _, end = DECODER.raw_decode(text, place)
        except RecursionError:
            raise ValueError("the call is nested too deeply") from None
        calls.append(read_call(read_json(text[place:end])))
        place = end + len(text[end:]) - len(text[end:].lstrip("; \t\r\n"))
    return calls


def read_call(value: Any) -> tuple[str, Any]:
    match value:
        case {"name": str(name)} if value.keys() <= KEYS and len(value.keys() & {"parameters", "arguments"}) == 1:
            return name, value["parameters" if "parameters" in value else "arguments"]
    raise ValueError("a call has a name and parameters, and nothing else")


def write_calls(rules: CallRules, tokens: GrammarTokens) -> str:
    """One call: these models make no more."""
    calls = " | ".join(write_call(name, *schema, "parameters") for name, schema in rules.schemas.items())
    tag = "" if rules.is_forced or tokens.find(TAG) is None else f"{tokens.write_mark(TAG)}?"
    return write_leading_calls("{", f"{tag} ({calls})", rules)


LLAMA_JSON = Format(
    name="llama3_json",
    signs=(('"parameters"', "ipython"), ('"parameters"', TAG)),
    fields={"tool_calls": {"open": [TAG, "{"], "at_start": True, "content": "calls"}, "content": {}},
    read_calls=read_objects,
    write_calls=write_calls,
)
