"""Translates the patterns of JSON schemas, which are ECMA-262's, into the library's regular expressions.

Those are of Rust's crate `regex`, in which the same text may mean something else. What both understand is written such
that neither doubts; what only one of them has is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from toka_async.grammars.errors import GrammarError

Range = tuple[int, int]  # first and last code point

DIGITS: list[Range] = [(0x30, 0x39)]
WORDS: list[Range] = [*DIGITS, (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
LINE_ENDS: list[Range] = [(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)]
BLANKS: list[Range] = [
    *((0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)),
    *((0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
]
CLASSES = {"d": DIGITS, "w": WORDS, "s": BLANKS}
CONTROLS = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D}
MOST_SHOWN = 200  # characters of a pattern
SURROGATES = range(0xD800, 0xE000)
COUNT = re.compile(r"(?:[*+?]|\{[0-9]+(?:,[0-9]*)?\})\??")
GROUP = re.compile(r"\((?:\?(?::|<(?![=!])[^>]*>)|(?!\?))")
# Categories and scripts that have the same name in both.
PROPERTY = re.compile(r"\\[pP]\{(?:(?:General_Category=|gc=)?[CLMNPSZ][a-z]?|(?:Script|sc)=[A-Z][A-Za-z_]*)\}")
PAIR = re.compile(r"\\u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})")
CODE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4}))")
LETTER = re.compile(r"\\c([a-zA-Z])")
# In a class these are of other dialects, or of ECMA's mode `v`.
OTHER_SETS = ("&&", "[:", "[.", "[=")


def translate(pattern: str) -> str:
    """Returns the regular expression for the library. Raises GrammarError for what it cannot have.

    Classes leave U+0000 out: where a class has all control characters the library takes it to have the quotation mark
    and the backslash as well.
    """
    return _Translation(pattern).write()


@dataclass(slots=True)
class _Group:
    """Where a group is read, or the whole. The library has anchors only where nothing can stand before or after them.

    began_first, is_first: nothing but anchors stood before its alternatives, before this place. is_over: $ did.
    ends: it did in any alternative.
    """

    began_first: bool = True
    is_first: bool = True
    is_over: bool = False
    ends: bool = False
    has_anchor: bool = False
    can_repeat: bool = False


@dataclass(slots=True)
class _Translation:
    pattern: str
    at: int = 0

    def write(self) -> str:
        parts, groups, here = list[str](), list[_Group](), _Group()
        while self.at < len(self.pattern):
            character = self.pattern[self.at]
            if here.can_repeat and (count := self._take(COUNT)):
                parts.append(count[0])
                here.can_repeat = False
            elif character == "|":
                self.at += 1
                parts.append("|")
                here.is_first, here.is_over, here.can_repeat = here.began_first, False, False
            elif character == "^":
                if not here.is_first or here.is_over:
                    raise self._refuse("^ within")
                self.at += 1
                parts.append("^")
                here.has_anchor, here.can_repeat = True, False
            elif character == "$":
                self.at += 1
                parts.append("$")
                here.has_anchor = here.is_over = here.ends = True
                here.can_repeat = False
            elif character == ")":
                if not groups:
                    raise self._refuse(") that ends nothing")
                self.at += 1
                parts.append(")")
                inner, here = here, groups.pop()
                here.is_first, here.can_repeat = here.is_first and inner.has_anchor, not inner.has_anchor
                here.has_anchor |= inner.has_anchor
                here.is_over, here.ends = inner.ends, here.ends or inner.ends
            elif here.is_over:
                raise self._refuse("$ before")
            elif character == "(":
                if not self._take(GROUP):
                    raise self._refuse("a group that looks around or sets flags,")
                parts.append("(?:")
                groups.append(here)
                here = _Group(here.is_first, here.is_first)
            else:
                parts.append(self._read_atom(character))
                here.is_first, here.can_repeat = False, True
        if groups:
            raise self._refuse("a group without an end")
        return "".join(parts)

    def _read_atom(self, character: str) -> str:
        if character == "[":
            return self._read_class()
        if character == ".":
            self.at += 1
            return _write_set(LINE_ENDS, [], is_negated=True)
        if character in "*+?{":
            raise self._refuse(f"{character} that repeats nothing")
        found = self._read_one(is_class=False)
        if isinstance(found, str):
            return found
        if found == 0:
            raise self._refuse("U+0000")
        return _write_point(found)

    def _read_class(self) -> str:
        self.at += 1
        is_negated = self.pattern.startswith("^", self.at)
        self.at += is_negated
        ranges, sets = list[Range](), list[str]()
        if self.pattern.startswith("]", self.at):
            raise self._refuse("an empty class")
        while not self.pattern.startswith("]", self.at):
            first = self._read_member()
            members = [first]
            if self.pattern.startswith("-", self.at) and not self.pattern.startswith("-]", self.at):
                self.at += 1
                last = self._read_member()
                if isinstance(first, int) and isinstance(last, int):
                    if first > last:
                        raise self._refuse("a range that ends before it begins")
                    ranges.append((first, last))
                    continue
                members += [ord("-"), last]  # a set bounds no range
            ranges += [(each, each) for each in members if isinstance(each, int)]
            sets += [each for each in members if isinstance(each, str)]
        self.at += 1
        written = _write_set(ranges, sets, is_negated=is_negated)
        if not written:
            raise self._refuse("U+0000")
        return written

    def _read_member(self) -> int | str:
        if self.at >= len(self.pattern):
            raise self._refuse("a class without an end")
        if any(self.pattern.startswith(each, self.at) for each in OTHER_SETS):
            raise self._refuse("an operation on classes")
        return self._read_one(is_class=True)

    def _read_one(self, *, is_class: bool) -> int | str:
        """Reads a character, or an escape: a code point, or the text of a set."""
        if self.pattern[self.at] != "\\":
            point = ord(self.pattern[self.at])
            self.at += 1
        elif (found := self._take(PAIR)) is not None:
            point = 0x10000 + ((int(found[1], 16) - 0xD800) << 10) + int(found[2], 16) - 0xDC00
        elif (found := self._take(CODE)) is not None:
            point = int(found[1] or found[2], 16)
        elif (found := self._take(LETTER)) is not None:
            point = ord(found[1]) % 32
        elif (found := self._take(PROPERTY)) is not None:
            return f"[{found[0]}--\\x00]"
        else:
            return self._read_escape(is_class=is_class)
        if point in SURROGATES:
            raise self._refuse("half of a surrogate pair")
        return point

    def _read_escape(self, *, is_class: bool) -> int | str:
        letter = self.pattern[self.at + 1 : self.at + 2]
        if letter.lower() in CLASSES and letter:
            self.at += 2
            return _write_set(CLASSES[letter.lower()], [], is_negated=letter.isupper())
        if letter in CONTROLS:
            point = CONTROLS[letter]
        elif letter == "b" and is_class:
            point = 0x08
        elif letter and letter.isascii() and letter.isprintable() and not letter.isalnum():
            point = ord(letter)
        else:
            raise self._refuse(f"\\{letter}")
        self.at += 2
        return point

    def _take(self, form: re.Pattern[str]) -> re.Match[str] | None:
        if (found := form.match(self.pattern, self.at)) is not None:
            self.at = found.end()
        return found

    def _refuse(self, what: str) -> GrammarError:
        return GrammarError(f"{what} at character {self.at + 1} of {self.pattern[:MOST_SHOWN]!r} cannot be enforced")


def _write_set(ranges: list[Range], sets: list[str], *, is_negated: bool) -> str:
    """Writes a class without U+0000; empty: it has nothing else."""
    if is_negated:
        ranges = [(0, 0), *ranges]
    else:
        ranges = [(max(first, 1), last) for first, last in ranges if last]
    texts = [_write_point(first) + (f"-{_write_point(last)}" if last > first else "") for first, last in ranges]
    return f"[{'^' * is_negated}{''.join([*texts, *sets])}]" if texts or sets else ""


def _write_point(point: int) -> str:
    character = chr(point)
    return character if character.isascii() and (character.isalnum() or character == " ") else f"\\x{{{point:x}}}"
