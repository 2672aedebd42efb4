"""The aiohttp runner of the app: its options, how long and how many connections last, JSON for what is not even HTTP.

Knows aiohttp's low-level server.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

from aiohttp import web

from toka_async.openai.errors import ApiError
from toka_async.server.errors import error_response
from toka_async.server.metrics import Metrics

logger = logging.getLogger(__name__)

LINGER = 2.0  # seconds for the rest of a body that nobody wants, so that its sender gets to see why


FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s"
)


class Connection(web.RequestHandler):
    """A connection whose protocol errors are JSON too, and that does not wait for ever for its client.

    While a part of a body is awaited, or of a response is to be taken, something must move within the server's
    `client_timeout`; else the connection is cut off, and its request cancelled. Waiting for a request is the
    framework's own keep-alive, with the same limit.
    """

    __slots__ = ("_limits", "_num_received", "_seen", "_timer")

    def __init__(self, manager: Server, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(manager, **options)
        self._limits = limits
        self._num_received = 0
        self._seen: tuple[int, ...] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Refuses it at once when there are too many."""
        if not self._limits.enter(self):
            whole = cast(asyncio.Transport, transport)
            body = error_response(ApiError(503, "too many connections", code="overloaded")).body
            assert isinstance(body, bytes)
            whole.write(FULL % (len(body), body))
            whole.close()
            return
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._limits.leave(self)
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport is not None:  # None: it was refused
            self._num_received += 1
            super().data_received(data)

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


class ConnectionLimits:
    """How many connections there may be at once, and for how many seconds one may wait for its client.

    num_cut: connections that were cut off. num_refused: those that were too many.
    """

    def __init__(self, most: int, client_timeout: float) -> None:
        self.most = most
        self.client_timeout = client_timeout
        self.num_cut = 0
        self.num_refused = 0
        self._open: set[Connection] = set()

    @property
    def num_open(self) -> int:
        return len(self._open)

    def enter(self, connection: Connection) -> bool:
        """False when there are too many."""
        if self.num_open >= self.most:
            self.num_refused += 1
            return False
        self._open.add(connection)
        return True

    def leave(self, connection: Connection) -> None:
        self._open.discard(connection)

    def show(self, metrics: Metrics) -> None:
        """From now on they are metrics."""
        metrics.watch_gauge("http_connections", "open HTTP connections", lambda: self.num_open)
        metrics.watch_count("http_connections_cut", "whose client neither sent nor took data", lambda: self.num_cut)
        metrics.watch_count("http_connections_refused", "more than may be open at once", lambda: self.num_refused)


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
