"""Writes grammars of whole outputs in llguidance's Lark, which is the one form in which they travel to ranks.

A grammar is `start: EXPRESSION`. The functions named `write_…` return expressions, which can be parts of larger ones:
literals, special tokens (`<tool_call>`) and other rules may stand beside them. Loads llguidance only to read other
dialects.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from toka_async.grammars.errors import GrammarError
from toka_async.grammars.exact_schemas import make_exact
from toka_async.grammars.schema_numbers import LOWEST, list_numbers

START = re.compile(r"^start\s*:", re.MULTILINE)
SCHEMA = re.compile(r"%json\s*")
MAX_EBNF = 1 << 16  # characters; the library reads it in Python, at 1 MB a second
SPECIAL = re.compile(r"[^\w ]|\n")  # what may have a meaning in a regular expression
GUIDANCE = "x-guidance"  # key at a schema's top level with options of llguidance, which precede ours
# A model could write blanks for ever. These are those that a document needs, in one line or indented.
WHITESPACE = r"\x20|\x0A[\x20\x09]{0,20}"


def make_grammar(expression: str) -> str:
    """Makes a grammar of outputs that match one expression."""
    return f"start: {expression}\n"


def rename_start(grammar: str, name: str) -> str:
    """Makes a grammar's start an ordinary rule, so that another grammar can use it."""
    return START.sub(f"{name}:", grammar, count=1)


def write_json(schema: Mapping[str, Any] | bool, *, strict: bool, options: Mapping[str, Any] | None = None) -> str:
    """Writes the JSON documents of a schema.

    Args:
        strict: keywords that cannot be enforced make the grammar invalid; otherwise they are left out.
        options: of llguidance, such as `whitespace_pattern`, instead of ours.

    Raises GrammarError where the schema is strict, and for one that no document matches.
    """
    if schema is False:
        raise GrammarError("the schema is false, so no document matches it")
    schema = {} if schema is True else schema
    ours: dict[str, Any] = {"lenient": not strict, **(options or {})}
    if "whitespace_flexible" not in ours:
        ours.setdefault("whitespace_pattern", WHITESPACE)
    given = schema.get(GUIDANCE, {})
    used = {**ours, **given} if isinstance(given, Mapping) else given
    is_lenient = isinstance(used, Mapping) and used.get("lenient") is True
    return f"%json {json.dumps(make_exact(schema, strict=not is_lenient) | {GUIDANCE: used})}"


def write_choice(texts: Sequence[str]) -> str:
    """Writes any one of these texts, as one regular expression: thousands of literals would be too much work."""
    return f"/{'|'.join(SPECIAL.sub(_escape, text) for text in texts)}/"


def _escape(character: re.Match[str]) -> str:
    return rf"\x{{{ord(character[0]):x}}}"


def write_text(text: str) -> str:
    """Writes exactly this text."""
    return json.dumps(text)


def write_regex(pattern: str) -> str:
    """Writes the texts that a regular expression matches as a whole; its syntax is that of Rust's crate `regex`.

    Raises GrammarError for what the library would take for another expression; it names other mistakes itself.
    """
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise GrammarError("it ends with a backslash that escapes nothing")
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(pattern)}/"


def read_grammar(text: str) -> str:
    """Returns a grammar that is written in Lark, or in the EBNF of llama.cpp and xgrammar, in Lark.

    Raises GrammarError.
    """
    from llguidance.gbnf_to_lark import any_to_lark, is_lark_syntax

    if len(text) > MAX_EBNF and not is_lark_syntax(text):
        raise GrammarError(f"EBNF of more than {MAX_EBNF} characters, which takes long to read; write it in Lark")
    try:
        lark = str(any_to_lark(text))
    except Exception as error:  # the library's own class is a bare Exception
        raise GrammarError(f"neither Lark nor EBNF: {' '.join(str(error).split())}") from None
    for found in SCHEMA.finditer(lark):
        try:
            schema, _ = json.JSONDecoder().raw_decode(lark, found.end())
        except (ValueError, RecursionError):
            continue  # the library says so
        if any(number < LOWEST for number in list_numbers(schema)):
            raise GrammarError(f"no grammar for the library: with a number below {LOWEST} in a schema it does not end")
    return lark
