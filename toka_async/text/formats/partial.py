r"""Regular expressions that match a beginning of what another one matches, up to the end of a text.

Text that arrives piece by piece is held back from where such a beginning is found. `re` has no partial matching, so the
expression is built from the tree that `re` parses: `ab*c` becomes `(?:a(?:b*(?:c|\Z)|\Z)|\Z)`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import import_module
from typing import Any

# There is no public module, and type checkers know these in some versions only.
ops: Any = import_module("re._constants")
parser: Any = import_module("re._parser")
CATEGORIES = {
    ops.CATEGORY_DIGIT: r"\d",
    ops.CATEGORY_NOT_DIGIT: r"\D",
    ops.CATEGORY_SPACE: r"\s",
    ops.CATEGORY_NOT_SPACE: r"\S",
    ops.CATEGORY_WORD: r"\w",
    ops.CATEGORY_NOT_WORD: r"\W",
}
PLACES = {
    ops.AT_BEGINNING: r"\A",
    ops.AT_BEGINNING_STRING: r"\A",
    ops.AT_END: r"\Z",
    ops.AT_END_STRING: r"\Z",
    ops.AT_BOUNDARY: r"\b",
    ops.AT_NON_BOUNDARY: r"\B",
}
REPEATS = {ops.MAX_REPEAT: "", ops.MIN_REPEAT: "?", ops.POSSESSIVE_REPEAT: "+"}
FLAGS = re.DOTALL

Node = tuple[Any, Any]


def compile_pattern(source: str) -> re.Pattern[str]:
    """Raises ValueError for an invalid expression. A dot matches line feeds too, as in response templates."""
    try:
        return re.compile(source, FLAGS)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{source!r} is no regular expression: {error}") from None


def compile_partial(source: str) -> re.Pattern[str]:
    """Returns an expression whose search finds the first place from which the rest of a text may begin a match.

    It always finds one, at the latest the empty end. Raises ValueError for lookarounds, references and flags inside,
    which cannot be decided from a beginning.
    """
    if compile_pattern(source).flags != FLAGS | re.UNICODE:
        raise ValueError("a pattern cannot have flags")
    return re.compile(_begin(list(parser.parse(source, FLAGS))), FLAGS)


def _begin(nodes: Sequence[Node]) -> str:
    r"""Matches a beginning of the sequence that ends at `\Z`, which may be all of it."""
    made = r"\Z"
    for node in reversed(nodes):
        inner = _begin_inside(node)
        made = rf"(?:{_write(node)}{made}{'|' if inner else ''}{inner}|\Z)"
    return made


def _begin_inside(node: Node) -> str:
    """Matches beginnings that end within the node; empty for one character."""
    match node:
        case (ops.SUBPATTERN, (_, _, _, inner)):
            return _begin(list(inner))
        case (ops.ATOMIC_GROUP, inner):
            return _begin(list(inner))
        case (ops.BRANCH, (_, branches)):
            return f"(?:{'|'.join(_begin(list(each)) for each in branches)})"
        case (ops.MAX_REPEAT | ops.MIN_REPEAT | ops.POSSESSIVE_REPEAT, (_, most, inner)):
            if begun := "" if _is_one(inner) else _begin(list(inner)):
                return f"{_repeat(inner, 0, most)}{begun}"
            return f"{_repeat(inner, 0, most)}\\Z"
    return ""


def _write(node: Node) -> str:
    match node:
        case (ops.LITERAL, code):
            return re.escape(chr(code))
        case (ops.NOT_LITERAL, code):
            return f"[^{_escape(code)}]"
        case (ops.ANY, _):
            return "."
        case (ops.IN, members):
            return f"[{''.join(map(_write_member, members))}]"
        case (ops.BRANCH, (_, branches)):
            return f"(?:{'|'.join(map(_write_all, branches))})"
        case (ops.SUBPATTERN, (_, 0, 0, inner)):
            return f"(?:{_write_all(inner)})"
        case (ops.ATOMIC_GROUP, inner):
            return f"(?>{_write_all(inner)})"
        case (ops.AT, place) if place in PLACES:
            return PLACES[place]
        case (ops.MAX_REPEAT | ops.MIN_REPEAT | ops.POSSESSIVE_REPEAT as kind, (least, most, inner)):
            return _repeat(inner, least, most) + REPEATS[kind]
    raise ValueError(f"a pattern cannot have {str(node[0]).lower()}: it does not show where a match may begin")


def _write_all(nodes: Sequence[Node]) -> str:
    return "".join(map(_write, nodes))


def _repeat(inner: Sequence[Node], least: int, most: int) -> str:
    return f"(?:{_write_all(inner)}){{{least},{'' if most is ops.MAXREPEAT else most}}}"


def _is_one(nodes: Sequence[Node]) -> bool:
    """Whether the nodes are a single character."""
    return len(nodes) == 1 and nodes[0][0] in (ops.LITERAL, ops.NOT_LITERAL, ops.ANY, ops.IN)


def _write_member(node: Node) -> str:
    match node:
        case (ops.NEGATE, _):
            return "^"
        case (ops.LITERAL, code):
            return _escape(code)
        case (ops.RANGE, (low, high)):
            return f"{_escape(low)}-{_escape(high)}"
        case (ops.CATEGORY, category) if category in CATEGORIES:
            return CATEGORIES[category]
    raise ValueError(f"a pattern cannot have {str(node[0]).lower()} in a set")


def _escape(code: int) -> str:
    """A character as it stands in a set."""
    return f"\\u{code:04x}" if code < 1 << 16 else f"\\U{code:08x}"
