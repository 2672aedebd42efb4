"""The bodies of requests: their room in the server's memory, their bytes, and what they ask for.

Knows aiohttp; knows nothing of what is asked.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeVar

from aiohttp import HttpVersion11, hdrs, web

from toka_async.config import LimitsConfig
from toka_async.openai.errors import ApiError
from toka_async.openai.parse import LARGE, bound_parsed_bytes, count_parsed_bytes, parse_request
from toka_async.openai.requests import WireRequest
from toka_async.server.access.errors import Handler
from toka_async.server.access.guard import viewer_of
from toka_async.server.engine.metrics import Metrics
from toka_async.server.http.body_deadline import BodyDeadline
from toka_async.server.limits.bodies import Bodies, Room

T = TypeVar("T", bound=WireRequest)

JSON = "application/json"
SMALL = 1 << 16  # bytes of a body that needs no room: a connection that nobody reads holds as many


@dataclass(frozen=True, slots=True)
class Receiving:
    """The common part of the bodies of one server.

    parsed: the room of parsed bodies. A request that has some never waits for room for a body, so that all get to their
    end. executor: parses large bodies.
    """

    config: LimitsConfig
    bodies: Bodies
    parsed: Bodies
    executor: Executor

    @property
    def most(self) -> int:
        """Bytes of the largest body."""
        return self.config.max_body_mb << 20

    @property
    def patience(self) -> float:
        """Seconds that a body waits for room at most; 0 for any."""
        limits = (self.config.receive_timeout, self.config.request_timeout)
        return min((seconds for seconds in limits if seconds), default=0.0)


RECEIVING: web.AppKey[Receiving] = web.AppKey("receiving", Receiving)
ROOM: web.RequestKey[Room] = web.RequestKey("room", Room)
PARSED_ROOM: web.RequestKey[Room] = web.RequestKey("parsed_room", Room)


def show_bodies(bodies: Bodies, metrics: Metrics) -> None:
    """Publish what bodies take and wait for."""
    metrics.watch_gauge("http_body_bytes", "reserved for bodies of requests", lambda: bodies.num_bytes)
    metrics.watch_gauge("http_bodies_waiting", "bodies that wait for room", lambda: bodies.num_waiting)
    metrics.watch_count("http_bodies_refused", "bodies that waited too long for room", lambda: bodies.num_refused)


def make_receiving(config: LimitsConfig, executor: Executor) -> Receiving:
    largest = config.max_body_mb << 20
    most = 8 * largest if config.max_bodies_mb == "auto" else config.max_bodies_mb << 20
    parsed = bound_parsed_bytes(largest)
    limit = "the memory for parsed bodies (a multiple of limits.max_body_mb)"
    return Receiving(config, Bodies(most, max(largest, most // 2)), Bodies(2 * parsed, parsed, limit), executor)


async def reserve(request: web.Request, num_bytes: int) -> None:
    """Waits for room for so much of the request's body, if that is more than a small one: its socket is not read.

    Raises:
        OverloadedError: there was none for too long.
    """
    if num_bytes > SMALL:
        receiving = request.app[RECEIVING]
        request[ROOM] = await receiving.bodies.reserve(owner_of(request), num_bytes, receiving.patience)


def owner_of(request: web.Request) -> str:
    """Returns the owner of a body: its key, or its address without keys."""
    return viewer_of(request) or request.remote or ""


def give_back_room(request: web.Request) -> None:
    """Gives back the room of a body, which nothing needs any more."""
    for key in (ROOM, PARSED_ROOM):
        if (room := request.get(key)) is not None:
            room.shrink(0)


@web.middleware
async def give_room_back(request: web.Request, handler: Handler) -> web.StreamResponse:
    """At the latest when a request has been answered, whatever the answer is."""
    check_framing(request)
    try:
        return await handler(request)
    finally:
        give_back_room(request)


async def read_body(request: web.Request) -> bytearray:
    """The whole body. One whose length is not said has room for the largest one from when it is no small one any more.

    Raises:
        ApiError: 413 when it is too large, unread if its length says so; 415 when it is compressed or no JSON; 408
            when it comes too slowly.
        OverloadedError: there was no room for it for too long.
        RequestPayloadError: it is broken.
    """
    check_length(request)
    body, length = bytearray(), request.content_length
    config = request.app[RECEIVING].config
    deadline = BodyDeadline(config.receive_timeout, config.request_timeout)
    if length is None:
        await read_more(request, body, SMALL, deadline)
    await reserve(request, request.app[RECEIVING].most if len(body) > SMALL else length or 0)
    await read_more(request, body, request.app[RECEIVING].most, deadline)
    if length is None and ROOM in request:
        request[ROOM].shrink(len(body))
    return body


async def read_more(request: web.Request, body: bytearray, most: int, deadline: BodyDeadline) -> None:
    """Until there is no more of it, or there is more than `most` bytes. Raises as `read_body` does."""
    content = request.content
    while len(body) <= most and not content.at_eof():
        if not (chunk := content.read_nowait()):  # most bodies come with their header
            async with deadline.limit_wait():
                chunk = await content.readany()
        body += chunk
        deadline.num_bytes = len(body)
    if len(body) > request.app[RECEIVING].most:
        raise too_large(request)


async def read_request(request: web.Request, kind: type[T]) -> T:
    """The request in the body. Raises as `read_body` and `parse_request` do; OverloadedError too, when there was no
    room for what a body becomes.
    """
    raw = await read_body(request)
    if len(raw) <= SMALL:
        return parse_request(raw, kind)
    receiving, loop = request.app[RECEIVING], asyncio.get_running_loop()
    executor = receiving.executor
    if len(raw) < LARGE:
        num_bytes = count_parsed_bytes(raw)
    else:
        num_bytes = await loop.run_in_executor(executor, count_parsed_bytes, raw)
    request[PARSED_ROOM] = await receiving.parsed.reserve(owner_of(request), num_bytes, receiving.patience)
    if len(raw) < LARGE:
        return parse_request(raw, kind)
    return await loop.run_in_executor(executor, parse_request, raw, kind)


async def read_optional(request: web.Request, kind: type[T]) -> T:
    """The request in the body, which may be missing. Raises as `read_request` does."""
    return await read_request(request, kind) if request.can_read_body else parse_request(b"{}", kind)


def check_length(request: web.Request) -> None:
    """Raises ApiError when the request says that its body is too large (413), compressed or no JSON (415)."""
    check_encoding(request)
    check_json(request)
    if (request.content_length or 0) > request.app[RECEIVING].most:
        raise too_large(request)


def check_json(request: web.Request) -> None:
    """Raises ApiError (415): the types that a page may send to other servers without asking are not taken for JSON."""
    kind = request.content_type
    if kind != JSON and not (kind.startswith("application/") and kind.endswith("+json")):
        given = request.headers.get(hdrs.CONTENT_TYPE)
        got = "it has none" if given is None else f"it has {given[:64]!r}"
        raise ApiError(415, f"a JSON body needs the header 'Content-Type: {JSON}'; {got}")


def check_encoding(request: web.Request) -> None:
    """Raises ApiError (415): nothing is unpacked, as 200 KB can be minutes of work and gigabytes for the event loop."""
    encoding = ", ".join(request.headers.getall(hdrs.CONTENT_ENCODING, ()))
    if encoding and encoding.lower() != "identity":
        raise ApiError(415, f"a body with Content-Encoding {encoding[:32]!r} is not supported: send it as it is")


def check_framing(request: web.Request) -> None:
    """A body is chunked, or as long as its header says. Raises RequestPayloadError: a proxy may read it another way."""
    coding = request.headers.getall(hdrs.TRANSFER_ENCODING, None)
    if coding is not None:
        if request.version < HttpVersion11:
            raise web.RequestPayloadError("Transfer-Encoding needs HTTP/1.1")
        if [text.strip().lower() for text in coding] != ["chunked"]:
            raise web.RequestPayloadError(f"Transfer-Encoding must be chunked, got {', '.join(coding)[:64]!r}")


def too_large(request: web.Request) -> ApiError:
    config = request.app[RECEIVING].config
    return ApiError(413, f"the body is larger than limits.max_body_mb ({config.max_body_mb} MiB)")
