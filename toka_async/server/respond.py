"""A running request to its HTTP response: one JSON document, or server-sent events.

Knows aiohttp; knows nothing of which API the answer belongs to.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TypeVar

import msgspec
from aiohttp import web

from toka_async.messages import Reason
from toka_async.openai.errors import ApiError
from toka_async.openai.parse import parse_request
from toka_async.server.answers import Answer, is_heavy, run_usage
from toka_async.server.errors import as_api_error
from toka_async.server.inflight import EngineStoppedError, InFlight, RequestFailedError
from toka_async.server.sample_text import Piece, SampleStream
from toka_async.server.service import Output, Run, Service, stop_token

T = TypeVar("T", bound=msgspec.Struct)

SERVICE: web.AppKey[Service] = web.AppKey("service", Service)
ENCODER = msgspec.json.Encoder()
LARGE = 1 << 20  # bytes of a body that is parsed in a thread
DONE = b"data: [DONE]\n\n"


def json_response(body: msgspec.Struct) -> web.Response:
    return web.Response(body=ENCODER.encode(body), content_type="application/json")


async def read_body(request: web.Request) -> bytes:
    """The whole body.

    Raises:
        ApiError: 413 when it is too large, unread if its length says so; 400 when it is broken.
    """
    check_length(request)
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise too_large(request) from None
    except web.RequestPayloadError as error:
        raise ApiError(400, f"the body cannot be read: {error}") from None


async def read_request(request: web.Request, kind: type[T]) -> T:
    """The request in the body. Raises ApiError as `read_body` and `parse_request` do."""
    raw = await read_body(request)
    if len(raw) < LARGE:
        return parse_request(raw, kind)
    executor = request.app[SERVICE].executor
    return await asyncio.get_running_loop().run_in_executor(executor, parse_request, raw, kind)


def check_length(request: web.Request) -> None:
    """Raises ApiError (413) when the request says that its body is too large."""
    if (request.content_length or 0) > request.app[SERVICE].config.max_body_mb << 20:
        raise too_large(request)


def too_large(request: web.Request) -> ApiError:
    return ApiError(413, f"the body is larger than server.max_body_mb ({request.app[SERVICE].config.max_body_mb} MiB)")


async def respond(request: web.Request, run: Run, answer: Answer) -> web.StreamResponse:
    """Waits for the samples, or sends what they say as they say it."""
    if run.generation.stream:
        return await Events(request, run, answer).send()
    service = request.app[SERVICE]
    outputs = await service.outputs(run)
    if not is_heavy(run, outputs):
        return json_response(answer.whole(run, outputs))
    build = partial(encode_whole, run, answer, outputs)
    body = await asyncio.get_running_loop().run_in_executor(service.executor, build)
    return web.Response(body=body, content_type="application/json")


def encode_whole(run: Run, answer: Answer, outputs: list[list[Output]]) -> bytes:
    return ENCODER.encode(answer.whole(run, outputs))


class Events:
    """The event stream of one request.

    Tokens are turned into text only when the client has taken what was sent before, so a slow reader costs what its
    tokens take as integers; what came meanwhile goes out as one chunk a sample.
    """

    def __init__(self, request: web.Request, run: Run, answer: Answer) -> None:
        self._request = request
        self._service = request.app[SERVICE]
        self._run = run
        self._answer = answer
        self._streams: dict[tuple[int, int], SampleStream] = {}
        self._num_open = len(run.prompts) * run.generation.n

    async def send(self) -> web.StreamResponse:
        """Sends everything. An error before the first event is an ordinary error response, later one an event."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        fresh = await self._run.batch.news()
        await response.prepare(self._request)
        try:
            await response.write(self._events(fresh))
            while self._num_open:
                await response.write(self._events(await self._run.batch.news()))
            if self._run.generation.include_usage:
                await response.write(event(self._answer.last(run_usage(self._run, self._num_tokens()))))
            await response.write(DONE)
        except (RequestFailedError, EngineStoppedError) as error:
            await response.write(event(as_api_error(error).response()))
        await response.write_eof()
        return response

    def _num_tokens(self) -> int:
        return sum(stream.num_tokens for stream in self._streams.values())

    def _events(self, fresh: list[tuple[InFlight, int]]) -> bytes:
        chunks = [chunk for flight, sample in fresh for chunk in self._chunks(flight, sample)]
        return b"".join(event(chunk) for chunk in chunks)

    def _chunks(self, flight: InFlight, sample: int) -> list[msgspec.Struct]:
        """What one sample has to say."""
        state, chunks = flight.samples[sample], []
        if state.muted:
            return []
        stream = self._streams.get((flight.index, sample))
        if stream is None:
            stream = SampleStream(self._service.tokenizer, self._run.options)
            self._streams[flight.index, sample] = stream
            first = self._answer.first(self._run, flight.index, sample)
            chunks += [] if first is None else [first]
        piece = stream.push(state.take(), state.reason)
        reason = state.reason
        stop: str | int | None = stop_token(self._run.generation, piece.rows, reason)
        if piece.stop is not None:
            self._service.engine.end_sample(flight, sample, stream.num_tokens)
            reason, stop = Reason.STOP_STRING, piece.stop
        self._num_open -= reason is not Reason.NONE
        if reason is not Reason.NONE or self._has_news(piece):
            chunks.append(self._answer.chunk(self._run, flight.index, sample, piece, reason, stop))
        return chunks

    def _has_news(self, piece: Piece) -> bool:
        """Tokens whose text is held back are worth a chunk when the request wants to see tokens."""
        generation = self._run.generation
        wants_tokens = generation.return_token_ids or generation.sampling.num_logprobs >= 0
        return bool(piece.text) or (wants_tokens and len(piece.rows) > 0)


def event(data: msgspec.Struct) -> bytes:
    """One server-sent event."""
    return b"data: " + ENCODER.encode(data) + b"\n\n"
