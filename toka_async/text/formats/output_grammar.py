"""Grammars of whole outputs: calls that must be made, and thoughts before what another grammar describes.

Grammars are in llguidance's Lark, which names a text that is one token by the token's id.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from toka_async.grammars.lark import make_grammar, write_json, write_text

START = re.compile(r"^start\s*:", re.MULTILINE)
FindToken = Callable[[str], int | None]
Schemas = Mapping[str, tuple[Mapping[str, Any], bool]]  # function -> the schema of its arguments, whether it is strict


def allow_thought(grammar: str, opening: str, closing: str, find_token: FindToken, *, is_open: bool) -> str:
    """Puts a thought before a grammar's output: one may be there, or must be when the prompt has begun it.

    find_token: the id of a text that is one token.
    """
    thought = f"toka_thought: /(.|\\n)*/ {write_mark(closing, find_token)} TOKA_BLANK"
    if find_token(closing) is None:
        pattern = re.escape(closing).replace("/", "\\/")
        thought = f"toka_thought: toka_closed TOKA_BLANK\ntoka_closed[lazy]: /(.|\\n)*{pattern}/"
    begun = "toka_thought" if is_open else f"({write_mark(opening, find_token)} toka_thought)?"
    output = START.sub("toka_output:", grammar, count=1)
    return f"start: {begun} toka_output\n{thought}\nTOKA_BLANK: /\\n{{0,2}}/\n{output}"


def write_hermes_calls(schemas: Schemas, find_token: FindToken, *, several: bool) -> str:
    opening, closing = (write_mark(each, find_token) for each in ("<tool_call>", "</tool_call>"))
    calls = (write_call(name, *schema, "arguments") for name, schema in schemas.items())
    call = f"({' | '.join(calls)})"
    one = f'{opening} "\\n" {call} "\\n" {closing}'
    return make_grammar(f'{one} ("\\n" {one})*' if several else one)


def write_llama_calls(schemas: Schemas, find_token: FindToken, *, several: bool) -> str:  # noqa: ARG001  # it writes one
    return make_grammar(" | ".join(write_call(name, *schema, "parameters") for name, schema in schemas.items()))


def write_mistral_calls(schemas: Schemas, find_token: FindToken, *, several: bool) -> str:
    """The newer form where the tokenizer has its token."""
    opening = write_mark("[TOOL_CALLS]", find_token)
    if find_token("[ARGS]") is None:
        call = f"({' | '.join(write_call(name, *schema, 'arguments') for name, schema in schemas.items())})"
        return make_grammar(f'{opening} "[" {call} {f"""("," " "? {call})*""" if several else ""} "]"')
    arguments = write_mark("[ARGS]", find_token)
    calls = (
        f"{opening} {write_text(name)} {arguments} {write_json(schema, strict=strict)}"
        for name, (schema, strict) in schemas.items()
    )
    return make_grammar(f"({' | '.join(calls)}){'+' if several else ''}")


def write_call(name: str, schema: Mapping[str, Any], strict: bool, key: str) -> str:
    """A call as an object with the name first."""
    properties = {"name": {"const": name}, key: schema or {"type": "object"}}
    whole = {"type": "object", "properties": properties, "required": ["name", key], "additionalProperties": False}
    for definitions in ("$defs", "definitions"):
        if definitions in schema:
            whole[definitions] = schema[definitions]
    return write_json(whole, strict=strict)


def write_mark(text: str, find_token: FindToken) -> str:
    token_id = find_token(text)
    return json.dumps(text) if token_id is None else f"<[{token_id}]>"
