"""The aiohttp runner of the app: its options, how long and how many connections last, JSON for what is not even HTTP.

Knows aiohttp's low-level server.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from http import HTTPStatus
from typing import Any, cast

from aiohttp import StreamReader, web

from toka_async.config import ServerConfig
from toka_async.openai.errors import ApiError
from toka_async.server.arrival import Arrival
from toka_async.server.errors import HEADERS, SlowBodyError, error_response
from toka_async.server.handshake import Handshakes
from toka_async.server.metrics import Metrics

logger = logging.getLogger(__name__)

LINGER = 2.0  # seconds for the rest of a body that nobody wants, so that its sender gets to see why


REFUSED = b"HTTP/1.1 %d %s\r\nContent-Type: application/json\r\n%sConnection: close\r\nContent-Length: %d\r\n\r\n%s"


class Connection(web.RequestHandler):
    """A connection whose protocol errors are JSON too, and that does not wait for ever for its client.

    While a part of a body is awaited, or of a response is to be taken, something must move within the server's
    `client_timeout`; else the connection is cut off, and its request cancelled. Waiting for a request is the
    framework's own keep-alive, with the same limit. What does move must be done in time (`Arrival`): a header, and
    then a body; the framework knows no such limit.
    """

    __slots__ = ("_arrival", "_arrival_timer", "_body", "_has_begun", "_limits", "_num_received", "_seen", "_timer")

    def __init__(self, manager: Server, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(manager, **options)
        self._limits = limits
        self._num_received = 0
        self._seen: tuple[int, ...] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._arrival = Arrival(limits.receive_timeout)
        self._arrival_timer: asyncio.TimerHandle | None = None
        self._has_begun = False  # a header, and it is not whole
        self._body: StreamReader | None = None  # the newest

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Refuses it at once when there are too many."""
        whole = cast(asyncio.Transport, transport)
        if (error := self._limits.enter(self, address_of(whole))) is not None:
            whole.write(refusal(error))
            whole.close()
            return
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._limits.leave(self)
        for timer in (self._timer, self._arrival_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport is None:  # it was refused
            return
        self._num_received += 1
        if not self._is_arriving:
            self._arrival.begin(self._loop.time())
        num_requests = self._request_count
        super().data_received(data)
        if self._request_count != num_requests:
            self._has_begun = False
            self._body = self._messages[-1][1] if self._messages else None
            self._arrival.begin(self._loop.time())
        elif self._is_body_arriving:
            self._arrival.num_bytes += len(data)
        else:
            self._has_begun |= bool(data)
        if self._is_arriving and self._arrival_timer is None and self._arrival.timeout:
            self._arrival_timer = self._loop.call_at(self._arrival.deadline, self._check_arrival)

    def pause_reading(self) -> None:
        """What has arrived is not taken: it is the server that takes its time."""
        super().pause_reading()
        self._arrival.pause(self._loop.time())

    def resume_reading(self, resume_parser: bool = True) -> None:
        """What has arrived is parsed at once, in `data_received`."""
        self._arrival.resume(self._loop.time())
        super().resume_reading(resume_parser)

    @property
    def _is_body_arriving(self) -> bool:
        return self._body is not None and not self._body.is_eof() and self._body.exception() is None

    @property
    def _is_arriving(self) -> bool:
        return self._has_begun or self._is_body_arriving

    def _check_arrival(self) -> None:
        """What is late is told so: its header here, its body by who reads it."""
        self._arrival_timer, now = None, self._loop.time()
        if not self._is_arriving or self.transport is None or self._reading_paused:
            return
        if self._has_begun and self._current_request is not None:
            self._arrival.since = now  # it is the server that takes its time: it answers another one
        if self._arrival.deadline > now:
            self._arrival_timer = self._loop.call_at(self._arrival.deadline, self._check_arrival)
            return
        self._limits.num_late += 1
        what = "body" if self._is_body_arriving else "header"
        message = f"the request's {what} came too slowly: server.receive_timeout is {self._arrival.timeout:g} s"
        if self._is_body_arriving:
            assert self._body is not None
            self._body.set_exception(SlowBodyError(message))
        else:
            self.transport.write(refusal(ApiError(408, message, code="timeout")))
            self.force_close()

    def _watch(self) -> None:
        """Looks twice in the time in which something must move."""
        self._timer = self._loop.call_later(self._limits.client_timeout / 2, self._check)

    def _check(self) -> None:
        state = self._state()
        if state is not None and state == self._seen:
            self._limits.num_cut += 1
            assert self.transport is not None
            self.transport.abort()
            return
        self._seen = state
        self._watch()

    def _state(self) -> tuple[int, ...] | None:
        """What changes as long as the client does its part; None: nothing is expected of it."""
        request, transport = self._current_request, self.transport
        if transport is None:
            return None
        left = transport.get_write_buffer_size()
        if left:
            sent = self._request_count, request.writer.output_size if request is not None else 0
            return (*sent, left)
        if request is not None and not request.content.is_eof() and not self._reading_paused:
            return (self._request_count, self._num_received)
        return None

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """As the framework's own, but in JSON, and without a stack trace in the log for what a client did wrong."""
        if request.writer.output_size > 0:
            raise ConnectionError("a part of the response is sent; there is no way to send an error")
        if status >= 500:
            logger.error("a connection failed", exc_info=exc)
        what = "internal error" if status >= 500 else f"bad HTTP: {message or exc}"
        response = error_response(ApiError(status, what))
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kwargs: Any) -> None:
        """As the framework's own, but not for a body that cannot be read: its sender has been told."""
        if not isinstance(kwargs.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **kwargs)


def address_of(transport: asyncio.Transport) -> str:
    """Of the other end."""
    peer = transport.get_extra_info("peername")
    return str(peer[0]) if isinstance(peer, tuple) else ""


def refusal(error: ApiError) -> bytes:
    """A whole response, for what has no request."""
    response = error_response(error)
    assert isinstance(response.body, bytes)
    names = [*HEADERS, *(["Retry-After"] if error.retry_after is not None else [])]
    headers = "".join(f"{name}: {response.headers[name]}\r\n" for name in names)
    reason = HTTPStatus(error.status).phrase
    return REFUSED % (error.status, reason.encode(), headers.encode(), len(response.body), response.body)


class ConnectionLimits:
    """How many connections there may be at once, in all and from one address, and how long one waits for its client.

    most_of_address: 0 for no limit. client_timeout, receive_timeout: seconds; 0 of the latter for any. num_cut:
    connections that were cut off. num_late: requests that came too slowly. num_refused: connections that were too many.
    handshakes: of connections that are not open yet.
    """

    def __init__(
        self, most: int, client_timeout: float, most_of_address: int = 0, receive_timeout: float = 0.0
    ) -> None:
        self.most = most
        self.most_of_address = most_of_address
        self.client_timeout = client_timeout
        self.receive_timeout = receive_timeout
        self.num_cut = 0
        self.num_late = 0
        self.num_refused = 0
        self.handshakes = Handshakes(most, most_of_address, lambda: self.num_open)
        self._open: dict[Connection, str] = {}
        self._num_of_address: Counter[str] = Counter()

    @property
    def num_open(self) -> int:
        return len(self._open)

    def enter(self, connection: Connection, address: str) -> ApiError | None:
        """Why it must not, when there are too many."""
        if self.num_open >= self.most:
            self.num_refused += 1
            return ApiError(503, "too many connections", code="overloaded", retry_after=1)
        if 0 < self.most_of_address <= self._num_of_address[address]:
            self.num_refused += 1
            message = f"too many connections from one address: server.max_address_connections is {self.most_of_address}"
            return ApiError(429, message, code="overloaded", retry_after=1)
        self._open[connection] = address
        self._num_of_address[address] += 1
        return None

    def leave(self, connection: Connection) -> None:
        address = self._open.pop(connection, None)
        if address is not None:
            self._num_of_address[address] -= 1
            if not self._num_of_address[address]:
                del self._num_of_address[address]

    def show(self, metrics: Metrics) -> None:
        """From now on they are metrics."""
        metrics.watch_gauge("http_connections", "open HTTP connections", lambda: self.num_open)
        metrics.watch_count("http_connections_cut", "whose client neither sent nor took data", lambda: self.num_cut)
        metrics.watch_count("http_requests_late", "that came too slowly", lambda: self.num_late)
        metrics.watch_gauge("tls_handshakes", "connections in their TLS handshake", lambda: self.handshakes.num_open)
        metrics.watch_count(
            "http_connections_refused",
            "more than may be open at once",
            lambda: self.num_refused + self.handshakes.num_refused,
        )


def connection_limits(most: int, config: ServerConfig) -> ConnectionLimits:
    return ConnectionLimits(most, config.client_timeout, config.max_address_connections, config.receive_timeout)


class Server(web.Server):
    """Makes such connections."""

    def __init__(self, *args: Any, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits = limits

    def __call__(self) -> web.RequestHandler:
        return Connection(self, self._limits, loop=self._loop, **self._kwargs)


class Runner(web.AppRunner):
    """Serves an app: handlers of clients that are gone are cancelled."""

    def __init__(
        self, app: web.Application, shutdown_timeout: float = 5.0, limits: ConnectionLimits | None = None
    ) -> None:
        self._limits = limits or ConnectionLimits(2**31, 75.0)
        super().__init__(
            app,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=shutdown_timeout,
            lingering_time=LINGER,
            auto_decompress=False,
            keepalive_timeout=self._limits.client_timeout,
        )

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        options: dict[str, Any] = made._kwargs
        return Server(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            loop=made._loop,
            limits=self._limits,
            **options,
        )
