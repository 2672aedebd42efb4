"""Structural tags as grammars: outputs in which texts, such as `<function=`, begin what follows a schema.

The forms are those of xgrammar 0.2, as vLLM and SGLang take them: `structures` with `triggers`, and the newer tree of
formats. What has no grammar here is refused by name. Special tokens of the model stand in texts by their names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from toka_async.grammars.errors import GrammarError
from toka_async.grammars.lark import read_grammar, rename_start, write_json, write_regex, write_text
from toka_async.openai.errors import bad_request

MOST_DEPTH = 24
ANY = "(?s:.*)"
Number = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Some = Annotated[str, Meta(min_length=1)]
Token = Number | Some
Piece = str | int  # text, or the id of a special token
End = list[Piece]


class TagFormat(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    """A format of a tree. What xgrammar has beyond these is refused, since its type or field is unknown."""


class ConstPart(TagFormat, frozen=True, kw_only=True, tag="const_string"):
    value: str


class JsonPart(TagFormat, frozen=True, kw_only=True, tag="json_schema"):
    json_schema: dict[str, Any] | bool
    style: Literal["json"] = "json"
    any_order: Annotated[bool, Meta(extra_json_schema={"const": False})] = False


class RegexPart(TagFormat, frozen=True, kw_only=True, tag="regex"):
    pattern: Some


class GrammarPart(TagFormat, frozen=True, kw_only=True, tag="grammar"):
    grammar: Some


class AnyTextPart(TagFormat, frozen=True, kw_only=True, tag="any_text"):
    excludes: list[Some] = []
    max_tokens: Number | None = None
    max_chars: Number | None = None


class AnyTokensPart(TagFormat, frozen=True, kw_only=True, tag="any_tokens"):
    exclude_tokens: list[Token] = []
    max_tokens: Number | None = None


class TokenPart(TagFormat, frozen=True, kw_only=True, tag="token"):
    token: Token


class ExcludePart(TagFormat, frozen=True, kw_only=True, tag="exclude_token"):
    exclude_tokens: list[Token] = []


class SequencePart(TagFormat, frozen=True, kw_only=True, tag="sequence"):
    elements: Annotated[list[AnyPart], Meta(min_length=1)]


class OrPart(TagFormat, frozen=True, kw_only=True, tag="or"):
    elements: Annotated[list[AnyPart], Meta(min_length=1)]


class OptionalPart(TagFormat, frozen=True, kw_only=True, tag="optional"):
    content: AnyPart


class PlusPart(TagFormat, frozen=True, kw_only=True, tag="plus"):
    content: AnyPart


class StarPart(TagFormat, frozen=True, kw_only=True, tag="star"):
    content: AnyPart


class RepeatPart(TagFormat, frozen=True, kw_only=True, tag="repeat"):
    min: Number
    max: Annotated[int, Meta(ge=-1, le=2**31 - 1)]
    content: AnyPart


class TagPart(TagFormat, frozen=True, kw_only=True, tag="tag"):
    begin: str | TokenPart
    content: AnyPart
    end: str | list[str] | TokenPart


class TriggeredPart(TagFormat, frozen=True, kw_only=True, tag="triggered_tags"):
    triggers: Annotated[list[Some], Meta(min_length=1)]
    tags: Annotated[list[TagPart], Meta(min_length=1)]
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: list[Some] = []


class SeparatedPart(TagFormat, frozen=True, kw_only=True, tag="tags_with_separator"):
    tags: Annotated[list[TagPart], Meta(min_length=1)]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


AnyPart = (
    ConstPart
    | JsonPart
    | RegexPart
    | GrammarPart
    | AnyTextPart
    | AnyTokensPart
    | TokenPart
    | ExcludePart
    | SequencePart
    | OrPart
    | OptionalPart
    | PlusPart
    | StarPart
    | RepeatPart
    | TagPart
    | TriggeredPart
    | SeparatedPart
)


class Structure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    begin: Some
    schema: dict[str, Any] | bool = True
    end: str


class OldTag(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    structures: Annotated[list[Structure], Meta(min_length=1)]
    triggers: Annotated[list[Some], Meta(min_length=1)]
    type: Literal["structural_tag"] = "structural_tag"

    @property
    def format(self) -> AnyPart:
        tags = [
            TagPart(begin=each.begin, content=JsonPart(json_schema=each.schema), end=each.end)
            for each in self.structures
        ]
        return TriggeredPart(triggers=self.triggers, tags=tags)


class NewTag(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: AnyPart
    type: Literal["structural_tag"] = "structural_tag"


def write_structural_tag(wish: Any, param: str, special_tokens: Mapping[str, int], end_ids: Iterable[int]) -> str:
    """Writes the grammar of whole outputs. Raises ApiError (400) that names the part at fault.

    Args:
        wish: as an object, or as a text of JSON.
        special_tokens: text -> id.
        end_ids: of tokens that end an output.
    """
    try:
        if isinstance(wish, str):
            wish = msgspec.json.decode(wish)
        kind: type[OldTag | NewTag] = OldTag if isinstance(wish, dict) and "structures" in wish else NewTag
        tag = msgspec.convert(wish, kind)
        writer = TagWriter(special_tokens, frozenset(end_ids))
        start = writer.write(tag.format, [], MOST_DEPTH)
    except RecursionError:
        raise bad_request(f"'{param}' is nested too deeply", param=param) from None
    except ValueError as error:  # of JSON, of fields, and of what has no grammar
        raise bad_request(f"'{param}': {error}", param=param) from None
    return f"start: {start}\n{writer.rules}"


@dataclass(slots=True)
class TagWriter:
    """Writes one tree. Parts are followed by ends, of which there are none where the output ends.

    Methods raise GrammarError for what has no grammar.
    """

    special_tokens: Mapping[str, int]
    end_ids: frozenset[int]
    lines: list[str] = field(default_factory=list)
    has_grammar: bool = False

    @property
    def rules(self) -> str:
        return "".join(f"{line}\n" for line in self.lines)

    def write(self, part: AnyPart, ends: list[End], depth: int) -> str:
        """Writes a part and what ends it."""
        if depth == 0:
            raise GrammarError("it is nested too deeply")
        match part:
            case AnyTextPart():
                return self._write_text(part, ends)
            case AnyTokensPart():
                return self._write_tokens(part, ends)
            case TriggeredPart():
                return self._write_triggered(part, ends, depth)
            case SequencePart():
                *first, last = part.elements
                before = " ".join(self._write_bounded(each, depth) for each in first)
                return f"{before} {self.write(last, ends, depth - 1)}"
            case OrPart():
                return f"({' | '.join(self.write(each, ends, depth - 1) for each in part.elements)})"
            case TagPart():
                begun, own = self._write_pieces(self._divide(part.begin)), self._find_ends(part.end)
                if not own and ends:
                    return f"{begun} {self.write(part.content, ends, depth - 1)}"
                return f"{begun} {self.write(part.content, own, depth - 1)} {self._write_ends(ends)}"
        return f"{self._write_closed(part, depth)} {self._write_ends(ends)}"

    def _write_closed(self, part: AnyPart, depth: int) -> str:
        """Writes a part that has an end of its own."""
        match part:
            case ConstPart():
                return self._write_pieces(self._divide(part.value)) or '""'
            case JsonPart():
                if part.any_order:
                    raise GrammarError("'any_order' of json_schema is not supported")
                return write_json(part.json_schema, strict=True)
            case RegexPart():
                return write_regex(part.pattern)
            case GrammarPart():
                if self.has_grammar:
                    raise GrammarError("a tree can have one part of the type 'grammar'")
                self.has_grammar = True
                self.lines.append(rename_start(read_grammar(part.grammar), "toka_grammar"))
                return "toka_grammar"
            case TokenPart():
                return f"<[{self._find_id(part.token)}]>"
            case ExcludePart():
                return self._write_other(map(self._find_id, part.exclude_tokens))
            case OptionalPart():
                return f"({self._write_bounded(part.content, depth)})?"
            case PlusPart():
                return f"({self._write_bounded(part.content, depth)})+"
            case StarPart():
                return f"({self._write_bounded(part.content, depth)})*"
            case RepeatPart():
                if -1 < part.max < part.min:
                    raise GrammarError("'max' of repeat is below 'min'")
                most = "" if part.max < 0 else part.max
                return '""' if part.max == 0 else f"({self._write_bounded(part.content, depth)}){{{part.min},{most}}}"
            case SeparatedPart():
                one = f"({' | '.join(self._write_bounded(each, depth) for each in part.tags)})"
                between = self._write_pieces(self._divide(part.separator))
                several = one if part.stop_after_first else f"{one} ({between} {one})*"
                return several if part.at_least_one else f"({several})?"
        raise AssertionError(part)

    def _write_bounded(self, part: AnyPart, depth: int) -> str:
        """Writes a part that something follows whose beginning it does not know."""
        if is_open(part):
            raise GrammarError("text without an end of its own has to be the last part, or stand alone in a tag")
        return self.write(part, [], depth - 1)

    def _write_text(self, part: AnyTextPart, ends: list[End]) -> str:
        marks = [each[0] for each in ends if isinstance(each[0], int)]
        if not part.excludes and part.max_chars is None and len(marks) == len(ends):
            return f"{self._write_many(marks, part.max_tokens)} {self._write_ends(ends)}"
        if part.max_tokens is not None:
            raise GrammarError("'max_tokens' of any_text needs an end that is a special token, and nothing beside it")
        most = "*" if part.max_chars is None else f"{{0,{part.max_chars}}}"
        text = self._exclude(f"/(?s:.){most}/", part.excludes)
        return self._write_until(text, ends)

    def _write_tokens(self, part: AnyTokensPart, ends: list[End]) -> str:
        marks = [each[0] for each in ends if isinstance(each[0], int)]
        if len(marks) < len(ends):
            raise GrammarError("any_tokens needs an end that is a special token")
        excluded = [*marks, *map(self._find_id, part.exclude_tokens)]
        return f"{self._write_many(excluded, part.max_tokens)} {self._write_ends(ends)}"

    def _write_triggered(self, part: TriggeredPart, ends: list[End], depth: int) -> str:
        """Writes free text up to a trigger, then one of its tags, and so on."""
        by_trigger = dict[Piece, list[str]]()
        for tag in part.tags:
            if not isinstance(tag.begin, str):
                raise GrammarError("tags of triggered_tags begin with texts")
            trigger = next((each for each in part.triggers if tag.begin.startswith(each)), None)
            if trigger is None:
                raise GrammarError(f"no trigger begins {tag.begin!r}")
            begun = self._divide(tag.begin)
            first, rest = (
                begun[0],
                begun[1:],
            )  # a special token is a trigger, whatever part of the text the caller named
            if isinstance(first, str):
                first, rest = trigger, self._divide(tag.begin[len(trigger) :])
            inside = self.write(tag.content, self._find_ends(tag.end), depth - 1)
            by_trigger.setdefault(first, []).append(f"{self._write_pieces(rest)} {inside}")
        rests = {trigger: f"({' | '.join(found)})" for trigger, found in by_trigger.items()}
        at_once = f"({' | '.join(f'{self._write_pieces([trigger])} {rest}' for trigger, rest in rests.items())})"
        end, marks = (
            self._write_ends(ends),
            [each for each in (*rests, *(each[0] for each in ends)) if isinstance(each, int)],
        )
        if len(marks) == len(rests) + len(ends) and not part.excludes:
            free = self._write_many(marks, None)
            after, tail = f"{free} {at_once}", f"{free} {end}"
        else:
            text = self._exclude(f"/{ANY}/", part.excludes)
            after = " | ".join(f"{self._write_up_to(text, [trigger])} {rest}" for trigger, rest in rests.items())
            tail = self._write_until(text, ends)
        if part.stop_after_first:
            return f"{at_once} {end}" if part.at_least_one else f"(({after}) {end} | {tail})"
        return f"{at_once if part.at_least_one else ''} ({after})* {tail}"

    def _write_until(self, text: str, ends: list[End]) -> str:
        """Writes text up to one of the ends, or all text. text: of terminals."""
        return f"({' | '.join(self._write_up_to(text, each) for each in ends)})" if ends else self._name(text)

    def _write_up_to(self, text: str, end: End) -> str:
        """Writes text and what ends it, which the text does not have. text: of terminals."""
        first, *rest = end
        if isinstance(first, int):
            return f"{self._name(text)} {self._write_pieces(end)}"
        name = self._name(f"({text}) {write_text(first)}")
        if rest:  # a special token ends the text
            return f"{name} {self._write_pieces(rest)}"
        self.lines.append(f"{name.lower()}[lazy]: {name}")
        return name.lower()

    def _exclude(self, text: str, excludes: Sequence[str]) -> str:
        return reduce(lambda found, each: f"{found} & ~/{ANY}{escape(each)}{ANY}/", excludes, text)

    def _name(self, expression: str) -> str:
        name = f"TOKA_TEXT_{len(self.lines)}"
        self.lines.append(f"{name}: {expression}")
        return name

    def _write_many(self, excluded: Iterable[int], most: int | None) -> str:
        count = "*" if most is None else f"{{0,{most}}}"
        return "" if most == 0 else f"{self._write_other(excluded)}{count}"

    def _write_other(self, excluded: Iterable[int]) -> str:
        ids = sorted(self.end_ids.union(excluded))
        return f"<[^{','.join(map(str, ids))}]>" if ids else "<[*]>"

    def _find_ends(self, end: str | list[str] | TokenPart) -> list[End]:
        found = [self._divide(each) for each in (end if isinstance(end, list) else [end])]
        if any(found) and not all(found):
            raise GrammarError("of several ends of a tag none can be empty")
        return [each for each in found if each]

    def _write_ends(self, ends: list[End]) -> str:
        return f"({' | '.join(map(self._write_pieces, ends))})" if ends else ""

    def _write_pieces(self, pieces: Sequence[Piece]) -> str:
        return " ".join(f"<[{each}]>" if isinstance(each, int) else write_text(each) for each in pieces)

    def _divide(self, text: str | TokenPart) -> list[Piece]:
        """Divides a text into special tokens and what is between them."""
        if isinstance(text, TokenPart):
            return [self._find_id(text.token)]
        names = sorted(filter(None, self.special_tokens), key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
        return [self.special_tokens.get(each, each) for each in parts if each]

    def _find_id(self, token: Token) -> int:
        if isinstance(token, int):
            return token
        if token not in self.special_tokens:
            raise GrammarError(f"the model has no special token {token!r}")
        return self.special_tokens[token]


def is_open(part: AnyPart) -> bool:
    """Whether a part goes on until something else ends it."""
    match part:
        case AnyTextPart() | AnyTokensPart() | TriggeredPart():
            return not (isinstance(part, TriggeredPart) and part.at_least_one and part.stop_after_first)
        case SequencePart():
            return is_open(part.elements[-1])
        case OrPart():
            return any(map(is_open, part.elements))
        case TagPart():
            return part.end in ("", [], [""]) and is_open(part.content)
    return False


def escape(text: str) -> str:
    return re.escape(text).replace("/", "\\/")
