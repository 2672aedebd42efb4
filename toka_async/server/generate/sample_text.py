"""The text of a sample, cut at its first stop string: of a whole sample, or piece by piece as it streams.

Both give the same text and keep the same tokens. Knows token ids and text; knows no messages but their reasons.
"""

from __future__ import annotations

from dataclasses import dataclass

from toka_async.messages import Reason
from toka_async.server.engine.rows import TokenRows
from toka_async.text.detokenize import Detokenizer
from toka_async.text.stop import StopFilter, StopStrings, first_stop_token
from toka_async.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """What a request says about its text.

    keep_ends: the text of an end token is part of the sample's text, whether the request or the model named it.
    """

    skip_special_tokens: bool = True
    stops: StopStrings | None = None
    min_tokens: int = 0
    keep_ends: bool = False

    def num_text_tokens(self, rows: TokenRows, reason: Reason) -> int:
        """How many of the rows have text: an end token has not, unless ends are kept."""
        return len(rows) - (reason is Reason.STOP and len(rows) > 0 and not self.keep_ends)


@dataclass(frozen=True, slots=True)
class SampleText:
    """The text; when `stop` cut it, the string and how many tokens it took (its own included)."""

    text: str
    stop: str | None = None
    num_tokens: int = 0


def sample_text(tokenizer: Tokenizer, ids: list[int], options: TextOptions) -> SampleText:
    """The text of a whole sample's ids, its end token left out."""
    skip, stops = options.skip_special_tokens, options.stops
    text = tokenizer.decode(ids, skip, continues=True)
    if stops is None or stops.find(text) is None:
        return SampleText(text)
    num_tokens = first_stop_token(
        stops, tokenizer, ids, skip_special_tokens=skip, continues=True, min_tokens=options.min_tokens
    )
    if num_tokens is None:
        return SampleText(text)
    before = Detokenizer(tokenizer, skip, continues=True).push(ids[: options.min_tokens])
    text = tokenizer.decode(ids[:num_tokens], skip, continues=True)
    match = stops.find(text, min_end=len(before))
    assert match is not None
    return SampleText(text[: match.cut], match.string, num_tokens)


@dataclass(frozen=True, slots=True)
class Piece:
    """What a streamed sample's new tokens add.

    rows: the tokens, those after a stop string left out. offsets: where each begins in the sample's text.
    stop: the stop string that ends the sample here.
    """

    text: str
    rows: TokenRows
    offsets: list[int]
    stop: str | None = None


class SampleStream:
    """The text of one sample as its tokens come.

    Attributes:
        num_tokens: tokens kept so far.
    """

    __slots__ = ("_detokenizer", "_filter", "_num_chars", "_options", "num_tokens")

    def __init__(self, tokenizer: Tokenizer, options: TextOptions) -> None:
        self._detokenizer = Detokenizer(tokenizer, options.skip_special_tokens, continues=True)
        self._filter = StopFilter(options.stops) if options.stops else None
        self._options = options
        self._num_chars = 0  # of the text that the tokens so far have, whether sent or held back
        self.num_tokens = 0

    def push(self, rows: TokenRows, reason: Reason) -> Piece:
        """New tokens, and Reason.NONE or why these were the last."""
        ids = rows.token_ids[: self._options.num_text_tokens(rows, reason)].tolist()
        texts: list[str] = []
        offsets: list[int] = []
        for token_id in ids:
            offsets.append(self._num_chars)
            texts.append(self._push_token(token_id))
            if self._filter is not None and self._filter.stopped:
                return Piece("".join(texts), rows.part(0, len(offsets)), offsets, self._filter.string)
        without_text = len(rows) - len(ids)
        self.num_tokens += without_text
        offsets += [self._num_chars] * without_text
        if reason is not Reason.NONE:
            texts.append(self._finish())
        return Piece("".join(texts), rows, offsets)

    def _push_token(self, token_id: int) -> str:
        """The text that may be sent now."""
        text = self._detokenizer.push((token_id,))
        self._num_chars += len(text)
        self.num_tokens += 1
        if self._filter is None:
            return text
        return self._filter.push(text, may_stop=self.num_tokens > self._options.min_tokens)[0]

    def _finish(self) -> str:
        """What was held back, now that nothing follows."""
        rest = self._detokenizer.finish()
        if self._filter is None:
            return rest
        return self._filter.push(rest, may_stop=False)[0] + self._filter.finish()
