"""A response template, read and checked: the regions of a model's text, what opens and closes each, and its content.

The form is that of transformers (`response_template` in tokenizer_config.json, version 1). Built-in templates have two
keys more: `at_start` of a region, which opens only before any other text; and `content: calls`, whose text, delimiters
included, the format reads itself. A field that repeats and has no `close` ends where it opens again.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toka_async.text.formats.contents import KINDS, PLACEHOLDER
from toka_async.text.formats.partial import compile_partial, compile_pattern

TEMPLATE_KEYS = {"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"}
FIELD_KEYS = {
    *("open", "open_pattern", "close", "close_pattern", "content", "content_args"),
    *("repeats", "join", "optional", "transform", "transform_each", "at_start"),
}
REASONING = ("reasoning_content", "reasoning", "thinking")
CALLS = "tool_calls"
MAX_EDGES = 256  # characters at a prompt's end

Json = Mapping[str, Any]
ReadCalls = Callable[[str], list[tuple[str, Any]]]  # a region's text to names and arguments; raises ValueError


class ResponseTemplateError(ValueError):
    """A response template is malformed; the message says where."""


@dataclass(frozen=True, slots=True)
class Anchor:
    """What opens or closes a region. partial: finds where such a thing may begin. fixed: it cannot become longer."""

    whole: re.Pattern[str]
    partial: re.Pattern[str]
    fixed: bool


@dataclass(frozen=True, slots=True)
class Region:
    """A field of a template. open: None where it is the text outside of all others. args: of its kind of content."""

    name: str
    open: Anchor | None
    close: Anchor | None
    kind: str
    args: Json
    transform: Any
    transform_each: bool
    join: str
    at_start: bool

    @property
    def reopens(self) -> bool:
        """Whether what opens the region also ends it, and begins the next."""
        return self.close is self.open

    @property
    def is_reasoning(self) -> bool:
        return self.name in REASONING

    @property
    def is_calls(self) -> bool:
        return self.name == CALLS


@dataclass(frozen=True, slots=True)
class ResponseTemplate:
    """outside: the region of the text outside of all others; None where that text is dropped. edges: finds what opens
    and closes regions at the end of a prompt, and white space between.
    """

    regions: tuple[Region, ...]
    outside: Region | None
    start: re.Pattern[str] | None
    edges: re.Pattern[str]

    def cut_prompt(self, prompt: str) -> str:
        """The part of a prompt that belongs to the answer already.

        It follows the last place where an answer starts. Where there is none, it is what opens and closes regions at
        the prompt's end, such as `<think>`.
        """
        starts = deque(self.start.finditer(prompt) if self.start is not None else (), maxlen=1)
        if starts:
            return prompt[starts[0].end() :]
        found = self.edges.search(prompt[-MAX_EDGES:])
        return "" if found is None else found[0]


def read_template(source: object) -> ResponseTemplate:
    """Raises ResponseTemplateError."""
    if not isinstance(source, dict) or not isinstance(fields := source.get("fields"), dict) or not fields:
        raise ResponseTemplateError("a response template is an object with 'fields'")
    if unknown := sorted(source.keys() - TEMPLATE_KEYS):
        raise ResponseTemplateError(f"a response template has no {unknown[0]!r}")
    if source.get("version", 1) != 1:
        raise ResponseTemplateError(f"version {source['version']} is not supported, only 1")
    regions = [_read_region(name, field) for name, field in fields.items()]
    outside = [region for region in regions if region.open is None]
    if len(outside) > 1:
        raise ResponseTemplateError(f"several fields have no 'open': {', '.join(each.name for each in outside)}")
    start = _read_anchor("response template", source, "start_anchor")
    inside = tuple(each for each in regions if each.open is not None)
    anchors = [anchor.whole.pattern for each in inside for anchor in (each.open, each.close) if anchor is not None]
    edges = re.compile(rf"(?:\s|{'|'.join(map(_without_names, anchors))})+\Z", re.DOTALL)
    return ResponseTemplate(inside, outside[0] if outside else None, None if start is None else start.whole, edges)


def _without_names(pattern: str) -> str:
    """The pattern with groups that have no names, so that several patterns can stand together."""
    return re.sub(r"\(\?P<\w+>", "(?:", pattern)


def _read_region(name: str, field: Any) -> Region:
    if not isinstance(field, dict):
        raise ResponseTemplateError(f"field {name!r} must be an object")
    if unknown := sorted(field.keys() - FIELD_KEYS):
        raise ResponseTemplateError(f"field {name!r} has no {unknown[0]!r}")
    kind, args, transform = field.get("content", "text"), field.get("content_args", {}), field.get("transform")
    if kind not in KINDS and kind != "calls":
        raise ResponseTemplateError(f"field {name!r}: there is no content {kind!r}")
    if kind == "xml-inline" and {"key", "value"} - compile_pattern(str(args.get("tag_pattern"))).groupindex.keys():
        raise ResponseTemplateError(f"field {name!r}: 'tag_pattern' needs the groups key and value")
    if transform is not None and not _is_transform(transform):
        raise ResponseTemplateError(f"field {name!r}: a placeholder of 'transform' must be a whole string")
    opening, closing = (_read_anchor(f"field {name!r}", field, key) for key in ("open", "close"))
    if closing is None and field.get("repeats"):
        closing = opening
    join = field.get("join", "")
    if not isinstance(join, str) or not isinstance(args, dict):
        raise ResponseTemplateError(f"field {name!r}: 'join' must be a string and 'content_args' an object")
    each, at_start = bool(field.get("transform_each")), bool(field.get("at_start"))
    return Region(name, opening, closing, kind, args, transform, each, join, at_start)


def _read_anchor(where: str, field: Json, key: str) -> Anchor | None:
    """One of several literals, the longest first, or a pattern."""
    literal, pattern = field.get(key), field.get(f"{key}_pattern")
    if literal is not None and pattern is not None:
        raise ResponseTemplateError(f"{where} has both {key!r} and '{key}_pattern'")
    try:
        if literal is None:
            return None if pattern is None else Anchor(compile_pattern(pattern), compile_partial(pattern), False)
        literals = sorted([literal] if isinstance(literal, str) else literal, key=len, reverse=True)
        if not literals or not all(literals):
            raise ResponseTemplateError(f"{where}: {key!r} must not be empty")
        source = "|".join(map(re.escape, literals))
        grows = any(one != other and one.startswith(other) for one in literals for other in literals)
        return Anchor(compile_pattern(source), compile_partial(source), not grows)
    except (TypeError, ValueError) as error:
        raise ResponseTemplateError(f"{where}: {key!r}: {error}") from None


def _is_transform(transform: Any) -> bool:
    """Whether no string mixes a placeholder with other text."""
    if isinstance(transform, dict | list):
        values: Sequence[Any] = list(transform.values()) if isinstance(transform, dict) else transform
        return all(map(_is_transform, values))
    return not isinstance(transform, str) or bool(PLACEHOLDER.fullmatch(transform)) or not PLACEHOLDER.search(transform)
