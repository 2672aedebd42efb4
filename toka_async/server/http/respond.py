"""A running request to its HTTP response: one JSON document, or server-sent events.

Knows aiohttp; knows nothing of which API the answer belongs to.
"""

from __future__ import annotations

import asyncio

import msgspec
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from toka_async.server.access.errors import as_api_error
from toka_async.server.engine.request_group import EngineStoppedError, RequestFailedError
from toka_async.server.engine.token_block import Score
from toka_async.server.generate.answers import Answer, WholeAnswer
from toka_async.server.generate.events import ENCODER, EventSource, StreamEvents
from toka_async.server.generate.service import Run, Service
from toka_async.server.generate.whole_body import whole_body
from toka_async.server.http.receive import give_back_room
from toka_async.server.http.rounds import Rounds

SERVICE: web.AppKey[Service] = web.AppKey("service", Service)
ROUNDS: web.AppKey[Rounds] = web.AppKey("rounds", Rounds)
GRACE = 5.0  # seconds for the end of a stream that has taken too long


def json_response(body: msgspec.Struct, status: int = 200) -> web.Response:
    return web.Response(status=status, body=ENCODER.encode(body), content_type="application/json")


async def respond(request: web.Request, run: Run, answer: Answer) -> web.StreamResponse:
    """Waits for the samples, or sends what they say as they say it. The body is nowhere any more."""
    if run.generation.stream:
        return await respond_with(request, run, StreamEvents(request.app[SERVICE], run, answer))
    return await respond_whole(request, run, answer)


async def respond_whole(request: web.Request, run: Run, answer: WholeAnswer) -> web.StreamResponse:
    give_back_room(request)
    body, _ = await whole_body(request.app[SERVICE], run, answer)
    return web.Response(body=body, content_type="application/json")


async def respond_with(request: web.Request, run: Run, events: EventSource) -> web.StreamResponse:
    give_back_room(request)
    return await stream_in_time(request, EventStream(request, run, events, request.app[ROUNDS]))


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


class EventResponse(web.StreamResponse):
    """A response whose header goes out with its first event: one write, for which the client wakes up once."""

    _send_headers_immediately = False  # aiohttp has no other way to say so


class EventStream:
    """The event stream of one request.

    Tokens are turned into text only when the client has taken what was sent before, so a slow reader costs what its
    tokens take as integers; what came meanwhile goes out as one chunk a sample. To a client that keeps up, a single
    sample's tokens go out in rounds, without waking up a task.
    """

    def __init__(self, request: web.Request, run: Run, events: EventSource, rounds: Rounds) -> None:
        self._request = request
        self._run = run
        self._events = events
        self._rounds = rounds
        self._protocol = request.protocol
        self._transport = request.transport  # None: the client has left
        self._token_ids: list[int] = []  # that go out in the next round
        self._scores: list[Score] = []  # of these, if any were asked for

    async def send(self) -> web.StreamResponse:
        """Sends everything. An error before the first event is an ordinary error response, later one an event."""
        response = EventResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        events, group = self._events, self._run.group
        block = await group.news(events.most_tokens)
        await response.prepare(self._request)
        try:
            await response.write(events.take(block))
            group.receive = self._receive if events.takes_lists else None
            while events.num_open:
                block = await group.news(events.most_tokens)
                self._send_lists()
                await response.write(events.take(block))
            if end := events.finish():
                await response.write(end)
        except (RequestFailedError, EngineStoppedError) as error:
            self._send_lists()
            await response.write(events.fail(as_api_error(error).response()))
        finally:
            group.receive = None  # the group would keep the request, and the request the group
        await response.write_eof()
        return response

    def _receive(self, token_ids: list[int], scores: list[Score]) -> bool:
        """Takes tokens if the client has taken what was sent before; the task notices if it has left."""
        if self._transport is None or self._transport.is_closing() or self._protocol.writing_paused:
            return False
        if not self._token_ids:
            self._rounds.add(self._send_lists)
        self._token_ids += token_ids
        self._scores += scores
        return True

    def _send_lists(self) -> None:
        """Sends what `_receive` has taken, unless the client has left."""
        token_ids, scores, self._token_ids, self._scores = self._token_ids, self._scores, [], []
        transport = self._transport
        if not token_ids or transport is None or transport.is_closing():
            return
        try:
            if data := self._events.take_lists(token_ids, scores):
                _write(self._request.writer, data)
        except Exception:
            transport.abort()  # the client must not take it for a whole answer
            raise


def _write(writer: AbstractStreamWriter, data: bytes) -> None:
    """Writes without waiting until the client has taken enough, for which aiohttp has no function of its own."""
    try:
        writer.write(data, drain=False).send(None)  # type: ignore[call-arg]
    except StopIteration:
        return
    raise AssertionError("a write that does not drain has waited")
