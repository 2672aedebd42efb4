"""Server-sent events of a streamed request that wants text alone: a step's rows of a connection at once.

The events of a sample differ in their text only, so each is its sample's prefix, the text as JSON, and a suffix; the
text of a token that is whole characters is looked up. Equal, byte for byte, to what `SampleEvents` makes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from toka_async.arrays import Int32
from toka_async.messages import Reason
from toka_async.server.engine.inflight import InFlight
from toka_async.server.engine.rows import NO_ROWS, REASONS, TokenBlock, token_rows
from toka_async.server.generate.answers import Answer
from toka_async.server.generate.events import ENCODER, event
from toka_async.server.generate.sample_text import Piece
from toka_async.server.generate.service import Run, Service, stop_token
from toka_async.text.detokenize import Detokenizer

MARK = "\0text\0"  # no id and no model's name has it


class TextEvents:
    """The events of one request."""

    def __init__(self, service: Service, run: Run, answer: Answer) -> None:
        self.num_open = len(run.prompts) * run.generation.n
        self.num_tokens = 0
        self._service = service
        self._run = run
        self._answer = answer
        self._texts = service.json_texts[run.options.skip_special_tokens]
        n = run.generation.n
        self._prefixes: list[list[bytes | None]] = [[None] * n for _ in run.prompts]
        self._suffix = b""
        self._held: dict[tuple[int, int], Detokenizer] = {}  # samples with an incomplete character

    def take(self, fresh: Sequence[tuple[InFlight, int]]) -> bytes:
        parts: list[bytes] = []
        for flight, _ in fresh:
            self._add(parts, flight.index, flight.take_news())
        return b"".join(parts)

    def _add(self, parts: list[bytes], prompt: int, block: TokenBlock) -> None:
        """Append what new tokens of a prompt's samples say."""
        self.num_tokens += block.token_ids.size
        prefixes, held = self._prefixes[prompt], self._held
        ids = block.token_ids.tolist()
        texts = list(map(self._texts.__getitem__, ids))
        start = 0
        columns = (block.samples, np.cumsum(block.counts), block.reasons)
        for sample, end, reason in zip(*(values.tolist() for values in columns), strict=True):
            prefix = prefixes[sample]
            if prefix is None:
                prefix = self._begin(parts, prompt, sample)
            text = texts[start] if end - start == 1 else joined(texts[start:end])
            if reason:
                parts.append(self._last(prompt, sample, block.token_ids[start:end], REASONS[reason]))
            elif text is None or (held and (prompt, sample) in held):
                text = self._held_text(prompt, sample, ids[start:end])
                if text:
                    parts += (prefix, text, self._suffix)
            elif text:
                parts += (prefix, text, self._suffix)
            start = end

    def _begin(self, parts: list[bytes], prompt: int, sample: int) -> bytes:
        """The sample's first chunk where there is one, and the prefix of its events."""
        first = self._answer.first(self._run, prompt, sample)
        if first is not None:
            parts.append(event(first))
        chunk = self._answer.chunk(self._run, prompt, sample, Piece(MARK, NO_ROWS, []), Reason.NONE, None)
        prefix, _, self._suffix = event(chunk).partition(ENCODER.encode(MARK)[1:-1])
        self._prefixes[prompt][sample] = prefix
        return prefix

    def _held_text(self, prompt: int, sample: int, ids: list[int]) -> bytes:
        """The JSON of a row's text where characters are incomplete, as far as it is final."""
        decoder = self._held.pop((prompt, sample), None) or self._detokenizer()
        text = decoder.push(ids)
        if decoder.holds:
            self._held[prompt, sample] = decoder
        return ENCODER.encode(text)[1:-1]

    def _last(self, prompt: int, sample: int, ids: Int32, reason: Reason) -> bytes:
        """The event of a sample's last tokens; an end token has no text."""
        rows = token_rows(ids)
        decoder = self._held.pop((prompt, sample), None) or self._detokenizer()
        text = decoder.push(ids[: self._run.options.num_text_tokens(rows, reason)].tolist()) + decoder.finish()
        self.num_open -= 1
        stop = stop_token(self._run.generation, rows, reason)
        return event(self._answer.chunk(self._run, prompt, sample, Piece(text, rows, []), reason, stop))

    def _detokenizer(self) -> Detokenizer:
        return Detokenizer(self._service.tokenizer, self._run.options.skip_special_tokens, continues=True)


def joined(texts: list[bytes | None]) -> bytes | None:
    """The texts of several tokens together; None where one is not whole characters."""
    return None if None in texts else b"".join(text for text in texts if text is not None)
