"""Divides a model's text into reasoning, content and tool calls as it comes, by a response template.

Whatever the pieces of a text are, what they give together is the same. A call is given when its region closes. What is
no well-formed call of an offered tool is content, as it was written.

Where a text ends before its region closes, JSON shows by itself whether a call is all there. Arguments of plain text do
not: they count where the model ended its answer and nothing but whole ones is there, as some models leave the last tag
out, and do not count where the answer was cut off.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from toka_async.text.formats.contents import apply_transform, read_content, read_json
from toka_async.text.formats.template import Anchor, ReadCalls, Region, ResponseTemplate
from toka_async.text.formats.typed_text import read_typed

TYPED = ("xml-inline", "kv-lines")  # contents whose values are text, whatever their schemas say
ESCAPED = re.compile(r"\\.", re.DOTALL)

Parameters = Mapping[str, Any]  # name of an offered tool -> the JSON schemas of its parameters by name


@dataclass(frozen=True, slots=True)
class Call:
    """arguments: a JSON object, as text."""

    name: str
    arguments: str


Part = tuple[Literal["reasoning", "content"], str] | Call


@dataclass(slots=True)
class Parsed:
    """What a piece of text adds to an answer, or all of it. parts: the same, in the order in which it was written."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list, compare=False)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)

    def add_reasoning(self, text: str) -> None:
        if text:
            self.reasoning += text
            self.parts.append(("reasoning", text))

    def add_content(self, text: str) -> None:
        if text:
            self.content += text
            self.parts.append(("content", text))

    def add_calls(self, calls: list[Call]) -> None:
        self.calls += calls
        self.parts += calls


class ResponseParser:
    """The state of one sample.

    Args:
        tools: those that may be called; without any, calls stay content.
        read_calls: reads regions of the kind `calls`.
        most_calls: calls that count; further ones are dropped.
        keeps_reasoning: reasoning is wanted; otherwise it is dropped.
        written: what the prompt has of the answer already, as `ResponseTemplate.cut_prompt` finds it.
    """

    def __init__(
        self,
        template: ResponseTemplate,
        tools: Parameters,
        read_calls: ReadCalls | None = None,
        *,
        most_calls: int | None = None,
        keeps_reasoning: bool = True,
        written: str = "",
    ) -> None:
        self._tools = tools
        self._read_calls = read_calls
        self._most_calls = most_calls
        self._keeps_reasoning = keeps_reasoning
        self._outside = template.outside
        self._regions = [each for each in template.regions if tools or not each.is_calls]
        self._buffer = ""
        self._position = 0  # of the first character that is not read yet
        self._region: Region | None = None  # the open one; None outside of all
        self._raw: list[str] = []  # of the open region of calls, its delimiters included
        self._body: list[str] = []  # the same without them
        self._captures: dict[str, str] = {}
        self._in_string = False  # the body ends within a string of JSON
        self._escape = ""  # a backslash at the body's end
        self._joins: set[str] = set()  # fields that have been open
        texts = [each for each in (*template.regions, template.outside) if each is not None and not each.is_calls]
        strips = {
            kind: all(each.args.get("strip", True) for each in texts if each.is_reasoning is kind)
            for kind in (True, False)
        }
        self._reasoning, self._content = _Trimmed(strips[True]), _Trimmed(strips[False])
        self._parsed = Parsed()
        self.num_calls = 0
        if written:
            self.push(written)
            self.num_calls = 0
            self._reasoning.drop_held()
            self._content.drop_held()

    def push(self, text: str, is_end: bool = False, is_cut: bool = False) -> Parsed:
        """Returns what the text adds, and what was held back if nothing follows.

        is_cut: the model had not ended the answer where it ends.
        """
        self._buffer += text
        self._parsed = Parsed()
        while True:
            found, held = self._find(is_end)
            if found is None:
                break
            region, match = found
            self._add(self._buffer[self._position : match.start()])
            self._position = match.end()
            if self._region is None:
                self._open(region, match)
            elif region.is_calls and region.kind == "json" and self._in_string:
                self._add(match[0])  # an argument quotes what would end the region
            elif region.reopens:
                self._close()
                self._open(region, match)
            else:
                self._raw.append(match[0])
                self._close()
        self._add(self._buffer[self._position : held])
        self._position = held
        if is_end:
            self._close(is_whole=False, is_cut=is_cut)
        cut = max(0, held - 1)  # one character stays, so that no pattern takes what follows for the start
        self._buffer, self._position = self._buffer[cut:], held - cut
        return self._parsed

    def _find(self, is_end: bool) -> tuple[tuple[Region, re.Match[str]] | None, int]:
        """The first thing that opens or closes a region, if it is certain, and up to where the text is certain."""
        best: tuple[Region, re.Match[str]] | None = None
        held = len(self._buffer)
        for region, anchor in self._watched():
            at_start = region.at_start and self._region is None
            match, begins = self._match_first(anchor, is_end) if at_start else self._search(anchor, is_end)
            if match is None:
                held = min(held, begins)
            elif best is None or (match.start(), -match.end()) < (best[1].start(), -best[1].end()):
                best = region, match
        return (best if best is not None and best[1].start() < held else None), held

    def _watched(self) -> list[tuple[Region, Anchor]]:
        """What may come next: the end of the open region, or the beginning of one."""
        if self._region is not None:
            return [] if self._region.close is None else [(self._region, self._region.close)]
        begun = self._content.begun or self.num_calls > 0
        opens = [(each, each.open) for each in self._regions if each.open is not None and not (each.at_start and begun)]
        if self._outside is not None and self._outside.close is not None:
            opens.append((self._outside, self._outside.close))
        return opens

    def _search(self, anchor: Anchor, is_end: bool) -> tuple[re.Match[str] | None, int]:
        """The first match that more text cannot change, and else where one may begin."""
        buffer, start, size = self._buffer, self._position, len(self._buffer)
        if is_end:
            return anchor.whole.search(buffer, start), size
        begun = anchor.partial.search(buffer, start)
        begins = size if begun is None else begun.start()
        match = anchor.whole.search(buffer, start) if begins > start else None
        if match is not None and match.start() < begins:
            return match, size
        return (anchor.whole.match(buffer, begins) if anchor.fixed else None), begins

    def _match_first(self, anchor: Anchor, is_end: bool) -> tuple[re.Match[str] | None, int]:
        """The same of a region that opens only before any other text."""
        size = len(self._buffer)
        start = size - len(self._buffer[self._position :].lstrip())
        match = anchor.whole.match(self._buffer, start)
        if is_end or start == size:
            return (match if is_end else None), size
        begun = anchor.partial.match(self._buffer, start)
        if match is not None and (begun is None or anchor.fixed):
            return match, size
        return None, size if begun is None else start

    def _open(self, region: Region, match: re.Match[str]) -> None:
        if region is self._outside:
            return  # its end is no text
        self._region = region
        self._captures = {name: value for name, value in match.groupdict().items() if value is not None}
        self._raw, self._body, self._in_string, self._escape = [match[0]], [], False, ""
        if region.join and region.name in self._joins:
            self._add(region.join)
        self._joins.add(region.name)

    def _add(self, text: str) -> None:
        region = self._region or self._outside
        if not text or region is None:
            return
        if region.is_calls:
            self._raw.append(text)
            self._body.append(text)
            rest = ESCAPED.sub("", self._escape + text)
            self._escape = "\\" if rest.endswith("\\") else ""
            self._in_string ^= bool(rest.count('"') & 1)
        elif region.is_reasoning:
            self._parsed.add_reasoning(self._reasoning.push(text) if self._keeps_reasoning else "")
        else:
            self._parsed.add_content(self._content.push(text))

    def _close(self, *, is_whole: bool = True, is_cut: bool = False) -> None:
        """Ends the open region. is_whole: what closes it has come."""
        region, self._region = self._region, None
        if region is None or not region.is_calls:
            return
        try:
            if not is_whole and region.kind in TYPED:
                self._check_unclosed(region, is_cut)
            calls = self._read_region(region)
        except ValueError:
            self._parsed.add_content(self._content.push("".join(self._raw)))
            return
        most = len(calls) if self._most_calls is None else self._most_calls - self.num_calls
        self._parsed.add_calls(calls[:most])
        self.num_calls += len(calls[:most])

    def _check_unclosed(self, region: Region, is_cut: bool) -> None:
        """Checks arguments of plain text after which the answer ended; a beginning of what closes them is left out.

        Raises ValueError for any that may not be all there.
        """
        if is_cut:
            raise ValueError("the call is cut off")
        body = "".join(self._body)
        if region.close is not None:
            begun = region.close.partial.search(body)
            body = body if begun is None else body[: begun.start()]
        if region.kind == "xml-inline" and re.sub(region.args["tag_pattern"], "", body, flags=re.DOTALL).strip():
            raise ValueError("an argument has no end")
        self._body = [body]

    def _read_region(self, region: Region) -> list[Call]:
        """Raises ValueError when the region has no well-formed calls of offered tools."""
        if region.kind == "calls":
            assert self._read_calls is not None
            found = self._read_calls("".join(self._raw))
        else:
            value = read_content(region.kind, "".join(self._body), region.args)
            found = [_function(each) for each in _shape(region, value, self._captures)]
        if not found or any(name not in self._tools for name, _ in found):
            raise ValueError("no call of an offered tool")
        return [self._make_call(name, arguments, region.kind in TYPED) for name, arguments in found]

    def _make_call(self, name: str, arguments: Any, is_text: bool) -> Call:
        if isinstance(arguments, str):
            arguments = read_json(arguments)
        if not isinstance(arguments, dict):
            raise ValueError("the arguments are no object")
        if is_text and isinstance(known := self._tools[name], dict):
            arguments = {
                key: read_typed(value, known.get(key)) if isinstance(value, str) else value
                for key, value in arguments.items()
            }
        return Call(name, msgspec.json.encode(arguments).decode())


def _shape(region: Region, value: Any, captures: Mapping[str, str]) -> list[Any]:
    """The calls of a region, in the shape that its transform gives them."""
    if region.transform is None:
        shaped = value
    elif region.transform_each:
        if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
            raise ValueError("the content is no list of objects")
        shaped = [apply_transform(region.transform, {**captures, **each}) for each in value]
    else:
        shaped = apply_transform(region.transform, {**captures, "content": value})
    return shaped if isinstance(shaped, list) else [shaped]


def _function(call: Any) -> tuple[str, Any]:
    """Name and arguments of a call in OpenAI's shape."""
    match call:
        case {"function": {"name": str(name), **rest}}:
            return name, rest.get("arguments", {})
    raise ValueError("a call is an object with a function and its name")


class _Trimmed:
    """A stream of text without white space at its start and its end, or with it.

    Attributes:
        begun: there is text already.
    """

    __slots__ = ("_held", "_strips", "begun")

    def __init__(self, strips: bool) -> None:
        self.begun = False
        self._strips = strips
        self._held: list[str] = []

    def push(self, text: str) -> str:
        """Returns what may be sent."""
        kept = text.rstrip()
        if not self._strips:
            self.begun |= bool(kept)
            return text
        if kept:
            text = "".join(self._held) + text if self.begun else text.lstrip()
            kept = text[: len(text.rstrip())]
            self._held, text = [], text[len(kept) :]
        if self.begun or kept:
            self._held.append(text)
        self.begun |= bool(kept)
        return kept

    def drop_held(self) -> None:
        self._held = []
