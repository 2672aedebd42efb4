"""Server-sent events of a streamed response, each with its name, its type and its number. Knows no HTTP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from toka_async.messages import Reason
from toka_async.openai.errors import ErrorResponse
from toka_async.server.engine.token_block import REASONS, Score, TokenBlock, TokenRows
from toka_async.server.generate.answers import wants_json_logprobs
from toka_async.server.generate.events import ENCODER, MOST_TOKENS, padding
from toka_async.server.generate.sample_text import StreamedTexts
from toka_async.server.generate.service import Run, Service
from toka_async.server.responses.answer import STATUSES, ResponseAnswer
from toka_async.server.responses.objects import (
    ArgumentsDelta,
    EndKind,
    EventInItem,
    ItemEvent,
    ReasoningDelta,
    ResponseEvent,
    ResponseFault,
    ResponseStatus,
    SummaryDelta,
    TextDelta,
)

ENDS: dict[ResponseStatus, EndKind] = {"completed": "response.completed", "failed": "response.failed"}
AnyEvent = ResponseEvent | ItemEvent | EventInItem


class ResponseEvents:
    """The events of one response.

    Its sample is read token by token where log-probs are wanted, as `ResponseAnswer.pieces` does it.
    """

    most_tokens = MOST_TOKENS
    takes_lists = False

    def __init__(self, service: Service, run: Run, answer: ResponseAnswer) -> None:
        self._run = run
        self._answer = answer
        self._reader = answer.start_reading(run)
        self._writer = answer.start_writing()
        self._by_token = wants_json_logprobs(run.generation)
        tokenizer = service.marking_tokenizer if run.generation.is_parsed else service.tokenizer
        self._samples = StreamedTexts(tokenizer, run.options, 1, 1, service.engine.requests.end_sample)
        self._ids: list[int] = []  # of the tokens that have come
        self._number = 0  # of the next event

    @property
    def num_open(self) -> int:
        """See EventSource."""
        return self._samples.num_open

    def take(self, block: TokenBlock) -> bytes:
        """See EventSource."""
        events: list[AnyEvent] = []
        if not self._number:
            begun = self._answer.begun
            events.append(ResponseEvent(type="response.created", response=begun))
            events.append(ResponseEvent(type="response.in_progress", response=begun))
        for row, count, number, request_id in self._samples.rows(block):
            for rows, reason in self._divide(block.tokens, count, REASONS[number]):
                if self._samples.num_open:  # a stop string may have ended it
                    events += self._push(row, rows, reason, request_id)
        return self._encode(events)

    def take_lists(self, _token_ids: list[int], _scores: list[Score]) -> bytes:
        """See EventSource."""
        raise AssertionError("a response's events are made of columns")

    def finish(self) -> bytes:
        """See EventSource."""
        return b""  # a response ends with its sample

    def fail(self, error: ErrorResponse) -> bytes:
        """See EventSource."""
        return self._encode(self._end(Reason.ERROR, ResponseFault(error.error.message)))

    def _divide(self, rows: TokenRows, count: int, reason: Reason) -> Iterator[tuple[TokenRows, Reason]]:
        """The tokens of a block, which has one sample's, each with why it was the last."""
        if not self._by_token or count < 2:
            yield rows, reason
            return
        for place in range(count):
            yield rows.part(place, place + 1), reason if place == count - 1 else Reason.NONE

    def _push(self, row: int, rows: TokenRows, reason: Reason, request_id: int) -> list[AnyEvent]:
        piece, reason = self._samples.push(row, rows, reason, request_id)
        self._ids += piece.rows.token_ids.tolist()
        events: list[AnyEvent] = []
        for part, logprobs in self._reader.push(piece.text, piece.rows, reason):
            events += self._writer.add(part, logprobs)
        if reason is Reason.NONE:
            return events
        return [*events, *self._end(reason)]

    def _end(self, reason: Reason, fault: ResponseFault | None = None) -> list[AnyEvent]:
        status = STATUSES[reason]
        events: list[AnyEvent] = [*self._writer.end(is_cut=reason.is_cut)]
        ended = self._answer.end(self._run, self._writer, reason, self._ids)
        ended = ended if fault is None else replace(ended, error=fault)
        kind = ENDS.get(status, "response.incomplete")
        return [*events, ResponseEvent(type=kind, response=ended)]

    def _encode(self, events: Sequence[AnyEvent]) -> bytes:
        """The events with their numbers, and with padding where the request wants some."""
        encoded = []
        for event in events:
            event = replace(event, sequence_number=self._number)
            if self._run.generation.pad_chunks and isinstance(
                event, TextDelta | ReasoningDelta | SummaryDelta | ArgumentsDelta
            ):
                event = replace(event, obfuscation=padding(event.delta))
            encoded.append(b"event: %b\ndata: %b\n\n" % (event.type.encode(), ENCODER.encode(event)))
            self._number += 1
        return b"".join(encoded)
