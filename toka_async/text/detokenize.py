"""Turns the token ids of one sequence into text as they arrive. Knows no stop strings and no messages."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from toka_async.text.pieces import strip_start
from toka_async.text.tokenizer import Tokenizer

UTF8_DECODER = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of a growing sequence.

    The pieces concatenate to `tokenizer.decode` of all ids with the same options, however the ids are portioned. An
    incomplete character is held back. Each call costs what its new ids cost. The options are those of `decode`.
    """

    __slots__ = ("_at_start", "_pieces", "_skip_special", "_strip", "_utf8")

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, continues: bool = False) -> None:
        self._pieces = tokenizer.pieces
        self._skip_special = skip_special_tokens
        self._at_start = not continues
        self._strip = 0 if continues else self._pieces.strip[1]
        self._utf8 = UTF8_DECODER("replace")

    def push(self, ids: Iterable[int]) -> str:
        """Returns the text that `ids` add and that is final."""
        raw, self._at_start = self._pieces.join(ids, self._skip_special, self._at_start)
        return self._strip_start(self._utf8.decode(raw))

    @property
    def holds(self) -> bool:
        return bool(self._utf8.getstate()[0])

    def finish(self) -> str:
        """Returns the rest: U+FFFD for a character that was never completed."""
        return self._strip_start(self._utf8.decode(b"", final=True))

    def _strip_start(self, text: str) -> str:
        if self._strip and text:
            text, self._strip = strip_start(text, self._pieces.strip[0], self._strip)
        return text
