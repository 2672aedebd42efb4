"""Stop strings: finds the tokens that can complete one, the token that does, and where the text is cut.

The match that ends first counts, and of those that end together the longest, so the cut does not depend on how the text
was portioned. Tokens are compared as bytes: UTF-8 is in a text exactly where its bytes are in the text's bytes,
whatever invalid bytes surround it, and a token that completes a string has a tail of the string's bytes at its own
start, or all of them inside. Only U+FFFD has no bytes of its own, so strings with it are confirmed for every token.
Knows no messages and no requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from toka_async.arrays import Bool
from toka_async.text.automaton import Automaton
from toka_async.text.detokenize import Detokenizer
from toka_async.text.tokenizer import Tokenizer
from toka_async.text.vocabulary import Vocabulary

REPLACEMENT = "\ufffd"
SYNC = 3  # bytes at the start of a window that can continue a character from before it
SLACK = 8  # tokens without text, such as skipped special ones, that may lie within a stop string


@dataclass(slots=True, frozen=True)
class StopMatch:
    """A stop string at characters `start` to `end` of a text, which is to be cut at character `cut`."""

    string: str
    start: int
    end: int
    cut: int


class StopStrings:
    """The stop strings of a request.

    window: how many last ids decide whether the last of them completes a string: one for each byte of the longest
    string, one more, and some for tokens without text and for a character that the window cuts. Only a string with more
    than `SLACK` tokens without text inside needs more; `first_stop_token` finds it in all ids.
    """

    def __init__(self, strings: Sequence[str], include: bool = False) -> None:
        """include: the stop string stays in the text. Raises ValueError without strings, or for an empty one or lone
        surrogates."""
        if not strings or not all(strings):
            raise ValueError("stop must be one or more strings that are not empty")
        self.strings = tuple(dict.fromkeys(strings))
        self.include = include
        try:
            self._encoded = [string.encode() for string in self.strings]
        except UnicodeEncodeError as error:
            raise ValueError("stop is not valid Unicode: it has a lone surrogate") from error
        self._replaces = any(REPLACEMENT in string for string in self.strings)
        self.window = max(map(len, self._encoded)) + 1 + SYNC + SLACK

    def completion_mask(self, vocabulary: Vocabulary, size: int | None = None) -> Bool:
        """Returns bool [size]: whether a token can complete one of the strings after some other ids.

        Some tokens that cannot are True too. `size` is the model's number of ids where it exceeds the vocabulary's.
        """
        size = vocabulary.size if size is None else size
        mask = np.zeros(max(size, vocabulary.size), dtype=np.bool_)
        if self._replaces:
            mask[: vocabulary.size] = True
        else:
            for string in self._encoded:
                mask[vocabulary.find_containing(string)] = True
                for begin in range(max(1, len(string) - vocabulary.max_bytes), len(string)):
                    mask[vocabulary.find_starting(string[begin:])] = True
        return mask[:size]

    def find(self, text: str, start: int = 0, min_end: int = 0) -> StopMatch | None:
        """Returns the first match in `text` from character `start` on that ends after character `min_end`."""
        best: tuple[int, int, str] | None = None
        for string in self.strings:
            begin = text.find(string, max(start, min_end - len(string) + 1))
            if begin >= 0 and (best is None or (begin + len(string), begin) < best[:2]):
                best = (begin + len(string), begin, string)
        if best is None:
            return None
        end, begin, string = best
        return StopMatch(string, begin, end, end if self.include else begin)

    def may_be_in(self, raw: bytes) -> bool:
        """Tells whether the text of these bytes can have one of the strings."""
        return self._replaces or any(string in raw for string in self._encoded)

    @cached_property
    def automaton(self) -> Automaton:
        """Builds an automaton that finds the strings in text that arrives piece by piece."""
        return Automaton(self.strings)


class StopFilter:
    """Cuts a stream of text at its first stop string; the pieces concatenate to the cut text.

    Text that may begin a stop string is held back until that is decided. string: the stop string that ended the text,
    or None.
    """

    __slots__ = ("_automaton", "_held", "_include", "_state", "stopped", "string")

    def __init__(self, stops: StopStrings) -> None:
        self._automaton = stops.automaton
        self._include = stops.include
        self._state = 0
        self._held = ""
        self.stopped = False
        self.string: str | None = None

    def push(self, piece: str, may_stop: bool = True) -> tuple[str, bool]:
        """Returns the text that may be sent now, and whether a stop string has ended it.

        Unless `may_stop`, no stop string ends within `piece` (`min_tokens`).
        """
        if self.stopped:
            return "", True
        automaton, state, place = self._automaton, self._state, 0
        if not state and automaton.firsts.isdisjoint(piece):
            return piece, False
        text = self._held + piece
        while place < len(piece):
            state, place = automaton.find(state, piece, place)
            if may_stop and (string := automaton.found[state]) is not None:
                end = len(text) - len(piece) + place
                self._held, self.stopped, self.string = "", True, string
                return text[: end if self._include else end - len(string)], True
        self._state = state
        num_held = automaton.held[state]
        self._held = text[len(text) - num_held :] if num_held else ""
        return text[: len(text) - num_held], False

    @property
    def holds(self) -> bool:
        """Whether text is held back that can be the beginning of a stop string."""
        return bool(self._held)

    def finish(self) -> str:
        """Returns the text that is held back, for a sequence that ended otherwise."""
        text, self._held = self._held, ""
        return text


def first_stop_token(
    stops: StopStrings,
    tokenizer: Tokenizer,
    ids: Sequence[int],
    *,
    skip_special_tokens: bool = True,
    continues: bool = False,
    min_tokens: int = 0,
    start: int = 0,
) -> int | None:
    """Returns after how many of a sample's `ids` its text first has a stop string, or None.

    min_tokens: strings complete after this many tokens or fewer do not count. start: strings that begin before this
    character do not count.
    """
    detokenizer = Detokenizer(tokenizer, skip_special_tokens, continues)
    length = len(detokenizer.push(ids[:min_tokens]))
    text = Detokenizer(tokenizer, skip_special_tokens, continues).push(ids)
    match = stops.find(text, start, min_end=length)
    if match is None:
        return None
    position = min_tokens
    while length < match.end:
        length += len(detokenizer.push(ids[position : position + 1]))
        position += 1
    return position


def window_stop(
    stops: StopStrings,
    tokenizer: Tokenizer,
    ids: Sequence[int],
    num_tokens: int,
    *,
    skip_special_tokens: bool = True,
    continues: bool = False,
    min_tokens: int = 0,
) -> int | None:
    """Computes `first_stop_token` from the last ids if no string was complete before the last one.

    ids: the last `stops.window` of the sample's first `num_tokens` ids, or all of them.
    """
    assert len(ids) == min(stops.window, num_tokens)
    skipped = num_tokens - len(ids)
    raw, _ = tokenizer.pieces.join(ids, skip_special_tokens, at_start=not (continues or skipped))
    if not stops.may_be_in(raw):
        return None
    found = first_stop_token(
        stops,
        tokenizer,
        ids,
        skip_special_tokens=skip_special_tokens,
        continues=continues or skipped > 0,
        min_tokens=max(0, min_tokens - skipped),
        start=_num_cut(tokenizer, ids, skip_special_tokens) if skipped else 0,
    )
    return None if found is None else skipped + found


class StopWatch:
    """Answers `window_stop` for one sample without reading the overlap of its windows again.

    Otherwise strings that nearly match would cost a look at a whole window for every token.
    """

    __slots__ = ("_detokenizer", "_num_tokens", "_options", "_state", "_stops", "_tokenizer")

    def __init__(
        self, stops: StopStrings, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, min_tokens: int = 0
    ) -> None:
        """The sample's text continues a prompt's."""
        self._stops = stops
        self._tokenizer = tokenizer
        self._options = (skip_special_tokens, min_tokens)
        self._detokenizer: Detokenizer | None = None  # has read the tokens so far, once two windows overlap
        self._state = 0
        self._num_tokens = -1

    def check(self, ids: Sequence[int], num_tokens: int) -> int | None:
        """Computes `window_stop`; `num_tokens` must rise from call to call."""
        skip, min_tokens = self._options
        num_new, self._num_tokens = num_tokens - self._num_tokens, num_tokens
        if num_new <= len(ids):
            if self._detokenizer is None:
                fresh = self._begin(ids, num_tokens)
            else:
                fresh = self._detokenizer.push(ids[len(ids) - num_new :])
            self._state, place = self._stops.automaton.find(self._state, fresh)
            if place == len(fresh) and self._stops.automaton.found[self._state] is None:
                return None
        self._detokenizer = None
        return window_stop(
            self._stops,
            self._tokenizer,
            ids,
            num_tokens,
            skip_special_tokens=skip,
            continues=True,
            min_tokens=min_tokens,
        )

    def _begin(self, ids: Sequence[int], num_tokens: int) -> str:
        """Returns the text of a window without the U+FFFD that only the window's start causes."""
        skip, _ = self._options
        self._detokenizer, self._state = Detokenizer(self._tokenizer, skip, continues=True), 0
        num_cut = _num_cut(self._tokenizer, ids, skip) if len(ids) < num_tokens else 0
        return self._detokenizer.push(ids)[num_cut:]


def _num_cut(tokenizer: Tokenizer, ids: Sequence[int], skip_special_tokens: bool) -> int:
    """Counts the U+FFFD at the start of a text whose first character may begin before the window."""
    raw, _ = tokenizer.pieces.join(ids, skip_special_tokens, at_start=False)
    num = 0
    while num < min(SYNC, len(raw)) and raw[num] & 0xC0 == 0x80:
        num += 1
    return num
