"""Server-sent events of a streamed request, sample by sample: for requests that want more than text.

Knows no HTTP; knows nothing of which API the answer belongs to.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from toka_async.messages import Reason
from toka_async.server.engine.inflight import InFlight
from toka_async.server.generate.answers import Answer, sample_usage
from toka_async.server.generate.sample_text import Piece, SampleStream
from toka_async.server.generate.service import Run, Service, stop_token

ENCODER = msgspec.json.Encoder()
PADDED = 32  # bytes, of which a text with its padding has a multiple


def event(data: msgspec.Struct) -> bytes:
    """One server-sent event."""
    return b"data: " + ENCODER.encode(data) + b"\n\n"


def padding(text: str) -> str:
    """Random characters, so many that who sees an encrypted chunk's size does not see the length of its text."""
    count = PADDED - len(ENCODER.encode(text)) % PADDED
    return secrets.token_urlsafe(count)[:count]


class SampleEvents:
    """The events of one request."""

    def __init__(self, service: Service, run: Run, answer: Answer) -> None:
        self.num_open = len(run.prompts) * run.generation.n
        self._service = service
        self._run = run
        self._answer = answer
        self._streams: dict[tuple[int, int], SampleStream] = {}

    @property
    def num_tokens(self) -> int:
        return sum(stream.num_tokens for stream in self._streams.values())

    def take(self, fresh: Sequence[tuple[InFlight, int]]) -> bytes:
        chunks = [chunk for flight, sample in fresh for chunk in self._chunks(flight, sample)]
        return b"".join(event(chunk) for chunk in chunks)

    def _chunks(self, flight: InFlight, sample: int) -> list[msgspec.Struct]:
        """What one sample has to say."""
        state, chunks = flight.samples[sample], []
        if state.muted:
            return []
        stream = self._streams.get((flight.index, sample))
        is_new = stream is None
        if stream is None:
            stream = SampleStream(self._service.tokenizer, self._run.options)
            self._streams[flight.index, sample] = stream
            first = self._answer.first(self._run, flight.index, sample)
            chunks += [] if first is None else [self._with_more(first, flight.index, 0, "")]
        piece = stream.push(state.take(), state.reason)
        reason = state.reason
        stop: str | int | None = stop_token(self._run.generation, piece.rows, reason)
        if piece.stop is not None:
            self._service.engine.end_sample(flight, sample, stream.num_tokens)
            reason, stop = Reason.STOP_STRING, piece.stop
        self.num_open -= reason is not Reason.NONE
        if reason is not Reason.NONE or self._has_news(piece):
            chunk = self._answer.chunk(self._run, flight.index, sample, piece, reason, stop)
            chunks.append(self._with_more(chunk, flight.index, stream.num_tokens, piece.text))
        if is_new and chunks and self._run.generation.return_token_ids:
            chunks[0] = self._answer.with_prompt(chunks[0], self._run, flight.index)
        return chunks

    def _with_more(self, chunk: msgspec.Struct, prompt: int, num_tokens: int, text: str) -> msgspec.Struct:
        """A chunk with this text, and what the request wants in every chunk."""
        generation = self._run.generation
        if generation.usage_in_chunks:
            chunk = replace(chunk, usage=sample_usage(self._run, prompt, num_tokens))
        return replace(chunk, obfuscation=padding(text)) if generation.pad_chunks else chunk

    def _has_news(self, piece: Piece) -> bool:
        """Tokens whose text is held back are worth a chunk when the request wants to see tokens."""
        generation = self._run.generation
        wants_tokens = generation.return_token_ids or generation.sampling.num_logprobs >= 0
        return bool(piece.text) or (wants_tokens and len(piece.rows) > 0)
