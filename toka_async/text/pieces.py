"""Tokens as bytes: compiles the decoder of a tokenizer.json to a table, id -> the bytes that the token adds.

Every decoder of language models concatenates per-token bytes, up to a different piece for the first token and spaces
stripped at the very start. So decoding is a join and one UTF-8 decode, in any portions, and streamed text equals whole
text by construction. Invalid UTF-8 becomes U+FFFD per maximal subpart (Unicode 15, section 3.9). In a run of byte
tokens (`<0xE4>`) this keeps the valid characters; the `tokenizers` library replaces every byte of it.

Knows no files and does not encode.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Stage = Callable[[str, bool], str]  # (token's text, whether it is the first token) -> its text

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
CLEANUP = (
    *((" " + mark, mark) for mark in (".", "?", "!", ",")),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    *((" " + suffix, suffix) for suffix in ("'s", "'ve", "'re")),
)


class TokenBytes(dict[int, bytes]):
    """Token id -> bytes; ids outside of the vocabulary (a model's padding) have none."""

    def __missing__(self, _key: int) -> bytes:
        return b""


@dataclass(slots=True, frozen=True)
class Pieces:
    """The text of each token.

    rest: bytes of a token anywhere but at the start. first: bytes of a text's first token; the same object as `rest`
    where they do not differ. shown: `rest` without the special tokens. special: ids of the special tokens. strip: the
    character removed at the start of a text, and at most how many.
    """

    rest: TokenBytes
    first: TokenBytes
    shown: TokenBytes
    special: frozenset[int]
    strip: tuple[str, int]

    def join(self, ids: Iterable[int], skip_special: bool, at_start: bool) -> tuple[bytes, bool]:
        """Returns the bytes of `ids`, and whether the next token is still the first of its text."""
        table = self.shown if skip_special else self.rest
        if not at_start or self.first is self.rest:
            return b"".join(map(table.__getitem__, ids)), at_start
        visible = [i for i in ids if i in table]
        if not visible:
            return b"", True
        return self.first[visible[0]] + b"".join(map(table.__getitem__, visible[1:])), False


def build_pieces(tokens: Mapping[int, str], special: frozenset[int], decoder: Mapping[str, Any] | None) -> Pieces:
    """Compiles the `decoder` of a tokenizer.json.

    tokens: id -> the vocabulary's spelling. special: ids of the special tokens. Raises ValueError for a decoder that
    does not concatenate per-token bytes.
    """
    plan = _DecoderSteps()
    for part in _flatten(decoder):
        plan.add(part)
    rest = TokenBytes({i: plan.piece(token, False) for i, token in tokens.items()})
    first = rest
    if plan.first_differs:
        first = TokenBytes({i: plan.piece(token, True) for i, token in tokens.items()})
    shown = TokenBytes({i: piece for i, piece in rest.items() if i not in special})
    return Pieces(rest=rest, first=first, shown=shown, special=special, strip=plan.strip)


def strip_start(text: str, char: str, count: int) -> tuple[str, int]:
    """Removes up to `count` leading `char`s; also returns how many the following text may still lose."""
    stripped = text
    while count and stripped.startswith(char):
        stripped, count = stripped[len(char) :], count - 1
    return stripped, 0 if stripped else count


class _DecoderSteps:
    """The parts of a decoder in order: stages on single tokens, then bytes, then steps on the fused text."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []
        self.encode: Callable[[str], bytes] = str.encode
        self.first_differs = False
        self.strip = ("", 0)
        self._bytes = False  # True once tokens are bytes, which may be parts of characters
        self._fused = False

    def add(self, part: Mapping[str, Any]) -> None:
        kind = part["type"]
        if kind == "Fuse":
            self._fused = True
        elif kind == "Strip" and self._fused and not part["stop"] and not self.strip[1]:
            self.strip = (part["content"], part["start"])
        elif self._bytes or self._fused:
            raise ValueError(f"decoder {kind!r} after the tokens are fused is not supported")
        elif kind == "ByteLevel":
            self.encode, self._bytes, self._fused = _byte_level, True, True
        elif kind == "ByteFallback":
            self.encode, self._bytes = _byte_fallback, True
        else:
            self.stages.append(_stage(part))
            self.first_differs |= kind in ("Join", "Metaspace", "WordPiece")

    def piece(self, token: str, first: bool) -> bytes:
        for stage in self.stages:
            token = stage(token, first)
        return self.encode(token)


def _flatten(decoder: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    if decoder is None:
        return [{"type": "Join"}]
    if decoder["type"] == "Sequence":
        return [part for inner in decoder["decoders"] for part in _flatten(inner)]
    return [decoder]


def _stage(part: Mapping[str, Any]) -> Stage:
    match part["type"]:
        case "Join":  # no decoder at all: tokens with spaces between them
            return lambda token, first: token if first else " " + token
        case "Replace" if "String" in part["pattern"]:
            old, new = part["pattern"]["String"], part["content"]
            return lambda token, _first: token.replace(old, new)
        case "Strip":
            return lambda token, _first: _strip_token(token, part["content"], part["start"], part["stop"])
        case "Metaspace":
            mark, dropped = part["replacement"], part.get("prepend_scheme", "always") != "never"
            return lambda token, first: token.replace(mark, "" if first and dropped else " ")
        case "WordPiece":
            return lambda token, first: _word_piece(token, first, part["prefix"], part["cleanup"])
    raise ValueError(f"decoder {part['type']!r} is not supported")


def _strip_token(token: str, char: str, start: int, stop: int) -> str:
    token, _ = strip_start(token, char, start)
    while stop and token.endswith(char):
        token, stop = token[: -len(char)], stop - 1
    return token


def _word_piece(token: str, first: bool, prefix: str, cleanup: bool) -> str:
    if not first:
        token = token.removeprefix(prefix) if token.startswith(prefix) else " " + token
    if cleanup:
        for old, new in CLEANUP:
            token = token.replace(old, new)
    return token


def _byte_fallback(token: str) -> bytes:
    match = BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.encode()


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes (openai/gpt-2, src/encoder.py): character -> byte."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {chr(256 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[char] for char in token])
    except KeyError:  # an added token with characters outside of the alphabet stands for itself
        return token.encode()
