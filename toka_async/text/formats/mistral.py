"""Mistral's formats: `[TOOL_CALLS][{"name": …}]`, and since 2025 `[TOOL_CALLS]NAME[ARGS]{…}` for each call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from toka_async.grammars.lark import write_json, write_text
from toka_async.text.formats.contents import read_json
from toka_async.text.formats.format import Format, new_call_id
from toka_async.text.formats.output_grammar import CallRules, GrammarTokens, write_call, write_marked_calls

OPEN, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
ID_LENGTH = 9  # Mistral's chat templates refuse other ids


def read_region(raw: str) -> list[tuple[str, Any]]:
    """Reads one call, or a list of them. Raises ValueError for any other text."""
    text = raw.removeprefix(OPEN).strip()
    if text.startswith(("[", "{")):
        value = read_json(text)
        return [_read_entry(each) for each in (value if isinstance(value, list) else [value])]
    head, has_args, arguments = text.partition(ARGS)
    if not has_args:
        place = text.find("{")
        head, arguments = text[:place], text[place:]
    return [(head.partition(CALL_ID)[0].strip(), read_json(arguments))]


def _read_entry(value: Any) -> tuple[str, Any]:
    match value:
        case {"name": str(name), "arguments": arguments}:
            return name, arguments
    raise ValueError("a call has a name and arguments")


def new_mistral_id() -> str:
    return new_call_id(ID_LENGTH, "")


def write_calls(rules: CallRules, tokens: GrammarTokens) -> str:
    """The newer form where the tokenizer has its token."""
    if tokens.find(ARGS) is None:
        call = f"({' | '.join(write_call(name, *schema, 'arguments') for name, schema in rules.schemas.items())})"
        calls = f'"[" {call} {f"""("," " "? {call})*""" if rules.several else ""} "]"'
        return write_marked_calls(OPEN, calls, replace(rules, several=False), tokens)
    arguments = tokens.write_mark(ARGS)
    calls = " | ".join(
        f"{write_text(name)} {arguments} {write_json(schema or {'type': 'object'}, strict=strict)}"
        for name, (schema, strict) in rules.schemas.items()
    )
    return write_marked_calls(OPEN, f"({calls})", rules, tokens, has_tail=False)


MISTRAL = Format(
    name="mistral",
    signs=((OPEN,),),
    fields={"tool_calls": {"open": OPEN, "repeats": True, "content": "calls"}, "content": {}},
    read_calls=read_region,
    write_calls=write_calls,
    markers=(ARGS, CALL_ID),
    new_id=new_mistral_id,
)
