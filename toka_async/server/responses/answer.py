"""From a request for a response to a request for the engine, and from its sample to the response."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from toka_async.messages import Reason
from toka_async.openai.errors import ApiError
from toka_async.openai.requests import ChatRequest
from toka_async.openai.responses import TokenLogprob
from toka_async.server.engine.token_block import TokenRows, concat_rows
from toka_async.server.generate.answers import run_usage, wants_json_logprobs
from toka_async.server.generate.chat import ChatAnswer, prepare_chat
from toka_async.server.generate.sample_text import SampleStream
from toka_async.server.generate.service import Output, PreparedRequest, Run, Service
from toka_async.server.generate.thinking import count_written
from toka_async.server.responses.items import OutputWriter
from toka_async.server.responses.objects import (
    IncompleteDetails,
    InputUsage,
    OutputUsage,
    ResponseFault,
    ResponseObject,
    ResponseStatus,
    ResponseUsage,
)
from toka_async.server.responses.requests import ResponsesRequest
from toka_async.server.responses.translate import make_chat, rename_field, rename_fields
from toka_async.text.formats.format import new_call_id
from toka_async.text.formats.parser import Call, Part, ResponseParser

TOO_LONG = "context_length_exceeded"
STATUSES: dict[Reason, ResponseStatus] = {
    Reason.STOP: "completed",
    Reason.STOP_STRING: "completed",
    Reason.LENGTH: "incomplete",
    Reason.ABORT: "cancelled",
    Reason.ERROR: "failed",
}


async def prepare_response(service: Service, wire: ResponsesRequest) -> tuple[PreparedRequest, ResponseAnswer]:
    """A request to submit, and what makes its response. Raises as `prepare_chat` does."""
    try:
        prepared, chat = await prepare_fitting(service, make_chat(wire), drops=wire.truncation == "auto")
    except ApiError as error:
        raise rename_fields(error) from None
    # What is found of its grammar once it runs names the field as it is here.
    own_name = rename_field(prepared.generation.grammar_param)
    generation = dataclasses.replace(prepared.generation, grammar_param=own_name)
    prepared, sampling = dataclasses.replace(prepared, generation=generation), generation.sampling
    begun = ResponseObject(
        id=f"resp_{wire.request_id or secrets.token_hex(16)}",
        created_at=chat.header.created,
        status="in_progress",
        model=service.name,
        instructions=wire.instructions,
        max_output_tokens=wire.max_output_tokens,
        metadata=wire.metadata or {},
        parallel_tool_calls=wire.parallel_tool_calls,
        reasoning=msgspec.to_builtins(wire.reasoning),
        temperature=sampling.temperature,
        text=msgspec.to_builtins(wire.text),
        tool_choice=msgspec.to_builtins(wire.tool_choice) or "auto",
        tools=msgspec.to_builtins(wire.tools),
        top_logprobs=max(0, sampling.num_logprobs),
        top_p=sampling.top_p,
        truncation=wire.truncation,
        user=wire.user,
        safety_identifier=wire.safety_identifier,
        prompt_cache_key=wire.prompt_cache_key,
    )
    return prepared, ResponseAnswer(service, chat, begun, summarizes=wire.reasoning.summary is not None)


async def prepare_fitting(service: Service, chat: ChatRequest, *, drops: bool) -> tuple[PreparedRequest, ChatAnswer]:
    """As `prepare_chat`. drops: of a conversation that is too long, as many of its first turns are left out as it takes
    for the rest to fit; what comes before the first user's message stays, and so does the last turn.
    """
    try:
        return await prepare_chat(service, chat)
    except ApiError as error:
        if not drops or error.code != TOO_LONG:
            raise
        too_long = error
    users = [place for place, message in enumerate(chat.messages) if message["role"] == "user"]
    fitting, low, high = None, 1, len(users)
    while low < high:
        middle = (low + high) // 2
        kept = [*chat.messages[: users[0]], *chat.messages[users[middle] :]]
        try:
            fitting, high = await prepare_chat(service, replace(chat, messages=kept)), middle
        except ApiError as error:
            if error.code != TOO_LONG:
                raise
            low = middle + 1
    if fitting is None:
        raise too_long
    return fitting


@dataclass(frozen=True, slots=True)
class ResponseAnswer:
    """The response of one request. begun: as it is before the first token."""

    service: Service
    chat: ChatAnswer
    begun: ResponseObject
    summarizes: bool

    def whole(self, run: Run, outputs: Sequence[Sequence[Output]]) -> ResponseObject:
        ((output,),) = outputs
        reader, writer = self.start_reading(run), self.start_writing()
        for text, rows, reason in self.pieces(run, output):
            for part, logprobs in reader.push(text, rows, reason):
                writer.add(part, logprobs)
        writer.end(is_cut=output.reason.is_cut)
        return self.end(run, writer, output.reason, output.rows.token_ids.tolist())

    def pieces(self, run: Run, output: Output) -> Iterator[tuple[str, TokenRows, Reason]]:
        """The sample, with why it ended at its last piece.

        It comes token by token where log-probs are wanted, so that each part gets those of its own tokens.
        """
        rows = output.rows
        if run.generation.sampling.num_logprobs < 0 or not len(rows):
            yield output.text, rows, output.reason
            return
        tokenizer = self.service.marking_tokenizer if run.generation.is_parsed else self.service.tokenizer
        stream, last = SampleStream(tokenizer, run.options), len(rows) - 1
        for place in range(len(rows)):
            each = rows.part(place, place + 1)
            reason = output.reason if place == last else Reason.NONE
            yield stream.push(each, reason).text, each, reason

    def start_reading(self, run: Run) -> PartReader:
        parser = None if self.chat.reading is None else self.chat.reading.start(0)
        return PartReader(run, self.chat, parser)

    def start_writing(self) -> OutputWriter:
        reading = self.chat.reading
        return OutputWriter(new_call_id if reading is None else reading.format.new_id, summarizes=self.summarizes)

    def end(self, run: Run, writer: OutputWriter, reason: Reason, ids: list[int]) -> ResponseObject:
        """The response of a sample that has ended; `ids` are its tokens."""
        status = STATUSES[reason]
        return replace(
            self.begun,
            status=status,
            completed_at=int(time.time()) if status == "completed" else None,
            error=ResponseFault("the grammar of the output failed") if status == "failed" else None,
            incomplete_details=IncompleteDetails() if status == "incomplete" else None,
            output=writer.items,
            usage=self.usage(run, writer, ids),
        )

    def usage(self, run: Run, writer: OutputWriter, ids: list[int]) -> ResponseUsage:
        used = run_usage(run, len(ids))
        cached = used.prompt_tokens_details.cached_tokens
        return ResponseUsage(
            input_tokens=used.prompt_tokens,
            input_tokens_details=InputUsage(cached_tokens=cached, cache_write_tokens=used.prompt_tokens - cached),
            output_tokens=len(ids),
            output_tokens_details=OutputUsage(self.count_thought(writer.reasoning, ids)),
            total_tokens=used.total_tokens,
        )

    def count_thought(self, reasoning: str, ids: list[int]) -> int:
        """The tokens of thoughts: those between their marks, or of their text where the marks are no single tokens."""
        reading, tokenizer = self.chat.reading, self.service.tokenizer
        if not reasoning or reading is None:
            return 0
        thought, counted = reading.format.thought, None
        if thought is not None:
            counted = count_written(ids, thought, tokenizer, is_open=thought.is_open(reading.written[0]))
        return min(len(tokenizer.encode(reasoning, False)), len(ids)) if counted is None else counted


class PartReader:
    """Divides a sample's text into parts, with the log-probs of the tokens that each consists of.

    The log-probs of tokens whose text is no content, or none at all, are left out: those of reasoning, of calls, of
    markers and of ends.
    """

    def __init__(self, run: Run, chat: ChatAnswer, parser: ResponseParser | None) -> None:
        self._run = run
        self._chat = chat
        self._parser = parser
        self._held: list[TokenRows] = []  # tokens whose text is not certain yet

    def push(self, text: str, rows: TokenRows, reason: Reason) -> Iterator[tuple[Part, list[TokenLogprob]]]:
        """Parts that new tokens add; where log-probs are wanted it is one token. reason: why the sample ends here."""
        parts: list[Part] = [("content", text)] if text else []
        if self._parser is not None:
            parts = self._parser.push(text, is_end=reason is not Reason.NONE, is_cut=reason.is_cut).parts
        if wants_json_logprobs(self._run.generation):
            self._held.append(rows)
        for part in parts:
            if isinstance(part, Call) or part[0] == "reasoning":
                yield part, []
            else:
                yield part, self._take_logprobs(part[1])
        if parts:
            self._held = []

    def _take_logprobs(self, text: str) -> list[TokenLogprob]:
        """The log-probs of the last tokens that were held, as many as have this text; markers may be before them."""
        held, self._held = self._held, []
        if not held:
            return []
        rows, missing = concat_rows(held), len(text.encode())
        start = len(rows)
        for token_id in reversed(rows.token_ids.tolist()):
            if missing <= 0:
                break
            missing -= len(self._chat.service.tokenizer.token_bytes(token_id))
            start -= 1
        made = self._chat.logprobs(self._run, rows.part(start, len(rows)))
        return [] if made is None or made.content is None else made.content
