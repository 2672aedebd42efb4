"""Grammars of whole answers: calls, thoughts before what another grammar describes, and text around them.

Grammars are in llguidance's Lark, which names a text that is one token by the token's id. Free text is then a number of
tokens, special ones included, which costs little to follow. Where a mark is several tokens, free text is characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from toka_async.grammars.lark import GUIDANCE, rename_start, write_json

SPECIAL = re.compile(r"(<\|\w+\|>)")
SPACING = ("whitespace_pattern", "whitespace_flexible", "item_separator", "key_separator")  # options of llguidance
ANY_TEXT = r"/(.|\n)*/"
BLANK = r"/\n{0,2}/"
FindToken = Callable[[str], int | None]
Schemas = Mapping[str, tuple[Mapping[str, Any], bool]]  # function -> the schema of its arguments, whether it is strict


class UnwritableError(ValueError):
    """A grammar cannot be written; the message says why."""


@dataclass(frozen=True, slots=True)
class GrammarTokens:
    """A model's tokens.

    find: the id of a text that is one token. end_ids: of tokens that end an answer. hidden: ids that free text does not
    have.
    """

    find: FindToken
    end_ids: frozenset[int]
    hidden: frozenset[int] = frozenset()

    def hide(self, text: str) -> GrammarTokens:
        """The same tokens, with one more that free text does not have."""
        token_id = self.find(text)
        return self if token_id is None else replace(self, hidden=self.hidden | {token_id})

    def write_mark(self, text: str) -> str:
        token_id = self.find(text)
        return json.dumps(text) if token_id is None else f"<[{token_id}]>"

    def write_marks(self, text: str) -> str:
        """Writes a text of which parts, such as `<|message|>`, are special tokens."""
        return " ".join(map(self.write_mark, filter(None, SPECIAL.split(text))))

    def write_any(self, *excluded: int) -> str:
        """Writes any one token of free text, but for these."""
        return _write_other(self.end_ids | self.hidden | set(excluded))

    def write_thinking(self, *excluded: int) -> str:
        """Writes any one token of a thought, which may have hidden ones."""
        return _write_other(self.end_ids | set(excluded))


def _write_other(ids: frozenset[int] | set[int]) -> str:
    return f"<[^{','.join(map(str, sorted(ids)))}]>" if ids else "<[*]>"


@dataclass(frozen=True, slots=True)
class Thought:
    """How a thought before an answer is written. after: what follows its end; empty: up to two line feeds."""

    opening: str
    closing: str
    after: str = ""

    @property
    def opening_parts(self) -> list[str]:
        """The opening, divided where special tokens are."""
        return [each for each in SPECIAL.split(self.opening) if each]

    def is_open(self, written: str) -> bool:
        """Whether the prompt has begun the thought, and not ended it. written: what it has of the answer."""
        return self.opening in written and self.closing not in written

    def is_over(self, written: str) -> bool:
        """Whether the prompt has ended the thought, or begun with something else."""
        return bool(written.strip()) and not self.is_open(written)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRules:
    """Which calls an answer may have. several: more than one. is_forced: one at least, and nothing but calls."""

    schemas: Schemas
    several: bool
    is_forced: bool = True

    def check_spacing(self) -> None:
        """Raises UnwritableError where functions differ in the white space that their JSON may have.

        The library follows several kinds of it from one place on, and fails where they part.
        """
        found = [schema.get(GUIDANCE) for schema, _ in self.schemas.values()]
        given = [[each.get(key) if isinstance(each, Mapping) else None for key in SPACING] for each in found]
        if any(each != given[0] for each in given):
            raise UnwritableError(f"the options of white space in {GUIDANCE!r} must be the same in all tools")


def allow_thought(
    grammar: str, thought: Thought, tokens: GrammarTokens, *, is_open: bool, budget: int | None = None
) -> str:
    """Puts a thought before a grammar's output: one may be there, or must be when the prompt has begun it.

    budget: the most tokens that it may have, without its marks. Raises UnwritableError for a budget where the end of a
    thought is no token of its own.
    """
    closing = tokens.find(thought.closing)
    after = tokens.write_marks(thought.after) if thought.after else "TOKA_BLANK"
    if closing is not None:
        count = "*" if budget is None else f"{{0,{budget}}}"
        inside = f"{tokens.write_thinking(closing)}{count} " if budget != 0 else ""
        rules = f"toka_thought: {inside}<[{closing}]> {after}"
    elif budget is not None:
        raise UnwritableError(f"{thought.closing} is not one token of this model")
    else:
        rules = f"toka_thought: toka_closed {after}\ntoka_closed[lazy]: {write_until(thought.closing)}"
    begun = "toka_thought" if is_open else f"({tokens.write_marks(thought.opening)} toka_thought)?"
    output = rename_start(grammar, "toka_output")
    return f"start: {begun} toka_output\n{rules}\nTOKA_BLANK: {BLANK}\n{output}"


def write_any_text(tokens: GrammarTokens) -> str:
    return f"start: {tokens.write_any()}*\n"


def write_marked_calls(
    opening: str, call: str, rules: CallRules, tokens: GrammarTokens, *, between: str = "", has_tail: bool = True
) -> str:
    """Writes calls that a mark opens, with text around them where the model may choose.

    Args:
        call: the expression of what follows the mark.
        between: the expression of what stands between calls that must be made.
        has_tail: text may follow a call.
    """
    mark = tokens.write_mark(opening)
    more = f"({between} {mark} toka_call)*" if rules.several else ""
    tail = f"toka_call: {call}\n"
    if rules.is_forced:
        return f"start: {mark} toka_call {more}\n{tail}"
    goes_on = rules.several and has_tail
    token_id = tokens.find(opening)
    if token_id is not None:
        text = f"{tokens.write_any(token_id)}*"
        calls = f"({mark} toka_call {text})*" if goes_on else f"({mark} toka_call {more})?"
        return f"start: {text} {calls}\n{tail}"
    calls = "(toka_begin toka_call)* toka_text" if goes_on else f"toka_begin toka_call {more} | toka_text"
    # A lazy rule ends where it can, so the other text does not have the mark.
    return f"start: {calls}\n{tail}toka_begin[lazy]: {write_until(opening)}\ntoka_text: {ANY_TEXT}\n"


def write_leading_calls(first: str, calls: str, rules: CallRules) -> str:
    """Writes calls that are the whole answer, or where the model may choose any text that does not begin as they do.

    Args:
        first: the character that begins calls.
        calls: their expression.
    """
    if rules.is_forced:
        return f"start: {calls}\n"
    return f"start: {calls} | TOKA_TEXT\nTOKA_TEXT: /\\s*([^\\s\\{first}](.|\\n)*)?/\n"


def write_until(text: str) -> str:
    """Writes the regular expression of any characters up to a text; it belongs into a lazy rule."""
    pattern = re.escape(text).replace("/", "\\/")
    return rf"/(.|\n)*{pattern}/"


def write_call(name: str, schema: Mapping[str, Any], strict: bool, key: str) -> str:
    """A call as an object with the name first."""
    properties = {"name": {"const": name}, key: schema or {"type": "object"}}
    whole = {"type": "object", "properties": properties, "required": ["name", key], "additionalProperties": False}
    return write_json(whole | find_shared(schema), strict=strict)


def find_shared(schema: Mapping[str, Any]) -> dict[str, Any]:
    """What a schema has at its top for all of its parts: schemas that they refer to, and options of llguidance."""
    return {key: schema[key] for key in ("$defs", "definitions", GUIDANCE) if key in schema}
