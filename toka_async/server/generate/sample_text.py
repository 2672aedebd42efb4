"""The text of a sample, cut at its first stop string: of a whole sample, or piece by piece as it streams.

Both give the same text and keep the same tokens. Knows token ids and text; knows no messages but their reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from toka_async.messages import Reason
from toka_async.server.engine.token_block import REASONS, TokenBlock, TokenRows
from toka_async.text.detokenize import Detokenizer
from toka_async.text.stop import StopFilter, StopStrings, first_stop_token
from toka_async.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """What a request says about its text.

    keep_ends: the text of an end token is part of the sample's text, whether the request or the model named it.
    offsets: where the tokens of a streamed sample begin in its text is wanted. text: the text is wanted; without it,
    texts are made only where stop strings are looked for.
    """

    skip_special_tokens: bool = True
    stops: StopStrings | None = None
    min_tokens: int = 0
    keep_ends: bool = False
    offsets: bool = True
    text: bool = True

    @property
    def needs_text(self) -> bool:
        """Whether samples are turned into text."""
        return self.text or self.stops is not None

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

    rows: the tokens, those after a stop string left out. offsets: where each begins in the sample's text, if that is
    wanted. stop: the stop string that ends the sample here. first: how many tokens the sample had before.
    """

    text: str
    rows: TokenRows
    offsets: list[int]
    stop: str | None = None
    first: int = 0


class SampleStream:
    """The text of one sample as its tokens come.

    Attributes:
        num_tokens: tokens kept so far.
        num_chars: of the text of these tokens, whether sent or held back; counted for offsets and stop strings alone.
    """

    __slots__ = ("_detokenizer", "_filter", "_options", "num_chars", "num_tokens")

    def __init__(self, tokenizer: Tokenizer, options: TextOptions) -> None:
        self._detokenizer = Detokenizer(tokenizer, options.skip_special_tokens, continues=True)
        self._filter = StopFilter(options.stops) if options.stops else None
        self._options = options
        self.num_chars = 0
        self.num_tokens = 0

    @property
    def is_open(self) -> bool:
        """Whether what the next token adds depends on those before it."""
        return self._detokenizer.holds or (self._filter is not None and self._filter.holds)

    def push_plain(self, ids: Sequence[int]) -> str:
        """The text that new tokens add where no stop strings, offsets or numbers of tokens are wanted."""
        return self._detokenizer.push(ids)

    def push(self, rows: TokenRows, reason: Reason) -> Piece:
        """New tokens, and Reason.NONE or why these were the last."""
        before = self.num_tokens
        if not self._options.needs_text:
            self.num_tokens += len(rows)
            return Piece("", rows, [], first=before)
        ids = rows.token_ids[: self._options.num_text_tokens(rows, reason)].tolist()
        if self._filter is None and not self._options.offsets:
            self.num_tokens += len(rows)
            text = self._detokenizer.push(ids)
            return Piece(text if reason is Reason.NONE else text + self._finish(), rows, [], first=before)
        texts: list[str] = []
        offsets: list[int] = []
        for token_id in ids:
            offsets.append(self.num_chars)
            texts.append(self._push_token(token_id))
            if self._filter is not None and self._filter.stopped:
                return Piece("".join(texts), rows.part(0, len(offsets)), offsets, self._filter.string, before)
        without_text = len(rows) - len(ids)
        self.num_tokens += without_text
        offsets += [self.num_chars] * without_text
        if reason is not Reason.NONE:
            texts.append(self._finish())
        return Piece("".join(texts), rows, offsets, first=before)

    def _push_token(self, token_id: int) -> str:
        """The text that may be sent now."""
        text = self._detokenizer.push((token_id,))
        self.num_chars += len(text)
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


class StreamedTexts:
    """The texts of a streamed request's samples: what they need beside the new tokens. A sample is a row here,
    prompt * n + sample; it has state of its own only while its text depends on tokens that have come before.

    Args:
        end_sample: told of samples that a stop string ended, by request id, sample and tokens kept.

    Attributes:
        num_open: samples that have not ended.
        num_tokens: kept of each sample so far, by row.
        num_chars: of the text of each sample so far, by row, if offsets are wanted.
        open: by row, samples whose next token's text is not that of the token alone.
        stopped: rows that a stop string has ended; their later tokens are dropped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        options: TextOptions,
        num_prompts: int,
        n: int,
        end_sample: Callable[[int, int, int], None],
    ) -> None:
        self.num_open = num_prompts * n
        self.num_tokens = [0] * self.num_open
        self.num_chars = [0] * self.num_open
        self.open: dict[int, SampleStream] = {}
        self.stopped: set[int] = set()
        self._tokenizer = tokenizer
        self._options = options
        self._n = n
        self._end_sample = end_sample

    def push_plain(self, row: int, ids: Sequence[int]) -> str:
        """The text that new tokens add to a sample that goes on, for requests of text alone without stop strings."""
        stream = self.open.pop(row, None) or SampleStream(self._tokenizer, self._options)
        text = stream.push_plain(ids)
        if stream.is_open:
            self.open[row] = stream
        self.num_tokens[row] += len(ids)
        return text

    def push(self, row: int, rows: TokenRows, reason: Reason, request_id: int) -> tuple[Piece, Reason]:
        """What new tokens add to a sample, and why it has ended, if it has."""
        stream = self.open.pop(row, None) or SampleStream(self._tokenizer, self._options)
        stream.num_tokens, stream.num_chars = self.num_tokens[row], self.num_chars[row]
        piece = stream.push(rows, reason)
        self.num_tokens[row], self.num_chars[row] = stream.num_tokens, stream.num_chars
        if piece.stop is not None:
            self.stopped.add(row)
            if reason is Reason.NONE:
                self._end_sample(request_id, row % self._n, stream.num_tokens)
            reason = Reason.STOP_STRING
        elif reason is Reason.NONE and stream.is_open:
            self.open[row] = stream
        self.num_open -= reason is not Reason.NONE
        return piece, reason

    def rows(self, block: TokenBlock) -> Iterator[tuple[int, int, int, int]]:
        """The rows of new tokens: row, number of tokens, reason, request id."""
        return zip((block.rows[0] * self._n + block.rows[1]).tolist(), *block.rows[2:5].tolist(), strict=True)

    def pieces(self, block: TokenBlock) -> Iterator[tuple[int, Piece, Reason]]:
        """What new tokens add, by row."""
        start = 0
        for row, count, reason, request_id in self.rows(block):
            if row not in self.stopped:
                tokens = block.tokens.part(start, start + count)
                yield row, *self.push(row, tokens, REASONS[reason], request_id)
            start += count
