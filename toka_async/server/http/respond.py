"""A running request to its HTTP response: one JSON document, or server-sent events.

Knows aiohttp; knows nothing of which API the answer belongs to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

import msgspec
from aiohttp import web

from toka_async.server.access.errors import as_api_error
from toka_async.server.engine.inflight import EngineStoppedError, InFlight, RequestFailedError
from toka_async.server.generate.answers import Answer, run_usage
from toka_async.server.generate.events import ENCODER, SampleEvents, event
from toka_async.server.generate.service import Run, Service, in_blocks
from toka_async.server.generate.text_events import TextEvents
from toka_async.server.generate.whole_body import whole_body
from toka_async.server.http.receive import give_back_room

SERVICE: web.AppKey[Service] = web.AppKey("service", Service)
GRACE = 5.0  # seconds for the end of a stream that has taken too long
DONE = b"data: [DONE]\n\n"


def json_response(body: msgspec.Struct) -> web.Response:
    return web.Response(body=ENCODER.encode(body), content_type="application/json")


async def respond(request: web.Request, run: Run, answer: Answer) -> web.StreamResponse:
    """Waits for the samples, or sends what they say as they say it. The body is nowhere any more."""
    give_back_room(request)
    if run.generation.stream:
        return await stream_in_time(request, EventStream(request, run, answer))
    body, _ = await whole_body(request.app[SERVICE], run, answer)
    return web.Response(body=body, content_type="application/json")


async def stream_in_time(request: web.Request, stream: EventStream) -> web.StreamResponse:
    """The engine ends what takes too long, and the stream says so; who does not even take that is cut off."""
    seconds = request.app[SERVICE].config.request_timeout
    try:
        async with asyncio.timeout(seconds + GRACE if seconds else None):
            return await stream.send()
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the client does not take its stream") from None


class StreamEvents(Protocol):
    """What the tokens of a streamed request become.

    num_open: samples that have not ended. num_tokens: kept so far.
    """

    num_open: int

    @property
    def num_tokens(self) -> int: ...

    def take(self, fresh: Sequence[tuple[InFlight, int]]) -> bytes:
        """The events of all that is new of some samples."""
        ...


class EventStream:
    """The event stream of one request.

    Tokens are turned into text only when the client has taken what was sent before, so a slow reader costs what its
    tokens take as integers; what came meanwhile goes out as one chunk a sample.
    """

    def __init__(self, request: web.Request, run: Run, answer: Answer) -> None:
        self._request = request
        self._run = run
        self._answer = answer
        service = request.app[SERVICE]
        events = TextEvents if in_blocks(run.generation) else SampleEvents
        self._events: StreamEvents = events(service, run, answer)

    async def send(self) -> web.StreamResponse:
        """Sends everything. An error before the first event is an ordinary error response, later one an event."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        fresh = await self._run.batch.news()
        await response.prepare(self._request)
        try:
            await response.write(self._events.take(fresh))
            while self._events.num_open:
                await response.write(self._events.take(await self._run.batch.news()))
            if self._run.generation.include_usage:
                await response.write(event(self._answer.last(run_usage(self._run, self._events.num_tokens))))
            await response.write(DONE)
        except (RequestFailedError, EngineStoppedError) as error:
            await response.write(event(as_api_error(error).response()))
        await response.write_eof()
        return response
