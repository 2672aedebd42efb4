"""HTTP connections: how many there may be, how long they last, JSON for what is not even HTTP; the runner of the app.

Knows aiohttp's low-level server. Three private attributes of its connections are read here (`_messages`,
`_request_count`, `_current_request`), so the package pins aiohttp to the minor versions that the tests ran with.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from aiohttp import StreamReader, web

from toka_async.config import LimitsConfig
from toka_async.openai.errors import ApiError
from toka_async.server.access.errors import HEADERS, SlowBodyError, error_response
from toka_async.server.engine.metrics import Metrics
from toka_async.server.http.read_deadline import Arrival

logger = logging.getLogger(__name__)

LINGER = 2.0  # seconds for the rest of a body that nobody wants, so that its sender gets to see why


REFUSED = b"HTTP/1.1 %d %s\r\nContent-Type: application/json\r\n%sConnection: close\r\nContent-Length: %d\r\n\r\n%s"


class HttpConnection(web.RequestHandler):
    """A connection whose protocol errors are JSON too, and that does not wait for ever for its client.

    While a part of a body is awaited, or of a response is to be taken, something must move within the server's
    `client_timeout`; else the connection is cut off, and its request cancelled. Waiting for a request is the
    framework's own keep-alive, with the same limit. What does move must be done in time (`Arrival`): a header, and
    then a body; the framework knows no such limit.

    A client that closes its side while it waits for an answer has left: its request is cancelled. HTTP cannot tell it
    from one that only says that it will send no more (`nc -N`), and generating for nobody is worse.
    """

    __slots__ = (
        "_arrival",
        "_arrival_timer",
        "_body",
        "_has_begun",
        "_limits",
        "_num_received",
        "_seen",
        "_slot",
        "_timer",
    )

    def __init__(self, server: web.Server, slot: Slot) -> None:
        self._slot = slot
        self._limits = limits = slot.limits
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # none is kept
            lingering_time=LINGER,
            auto_decompress=False,
            keepalive_timeout=limits.client_timeout,
        )
        self._num_received = 0
        self._seen: tuple[int, ...] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._arrival = Arrival(limits.receive_timeout)
        self._arrival_timer: asyncio.TimerHandle | None = None
        self._has_begun = False  # a header, and it is not whole
        self._body: StreamReader | None = None  # the newest

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._slot.release()
        for timer in (self._timer, self._arrival_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._num_received += 1
        if not self._is_arriving:
            self._arrival.begin(asyncio.get_running_loop().time())
        num_requests = self._request_count
        super().data_received(data)
        if self._request_count != num_requests:
            self._has_begun = False
            self._body = self._messages[-1][1] if self._messages else None
            self._arrival.begin(asyncio.get_running_loop().time())
        elif self._is_body_arriving:
            self._arrival.num_bytes += len(data)
        else:
            self._has_begun |= bool(data)
        if self._is_arriving and self._arrival_timer is None and self._arrival.timeout:
            self._arrival_timer = asyncio.get_running_loop().call_at(self._arrival.deadline, self._check_arrival)

    def pause_reading(self) -> None:
        """What has arrived is not taken: it is the server that takes its time."""
        super().pause_reading()
        self._arrival.pause(asyncio.get_running_loop().time())

    def resume_reading(self, resume_parser: bool = True) -> None:
        """What has arrived is parsed at once, in `data_received`."""
        self._arrival.resume(asyncio.get_running_loop().time())
        super().resume_reading(resume_parser)

    @property
    def _is_body_arriving(self) -> bool:
        return self._body is not None and not self._body.is_eof() and self._body.exception() is None

    @property
    def _is_arriving(self) -> bool:
        return self._has_begun or self._is_body_arriving

    def _check_arrival(self) -> None:
        """What is late is told so: its header here, its body by who reads it."""
        self._arrival_timer, now = None, asyncio.get_running_loop().time()
        if not self._is_arriving or self.transport is None or self._arrival.paused is not None:
            return
        if self._has_begun and self._current_request is not None:
            self._arrival.since = now  # it is the server that takes its time: it answers another one
        if self._arrival.deadline > now:
            self._arrival_timer = asyncio.get_running_loop().call_at(self._arrival.deadline, self._check_arrival)
            return
        self._limits.num_late += 1
        what = "body" if self._is_body_arriving else "header"
        message = f"the request's {what} came too slowly: limits.receive_timeout is {self._arrival.timeout:g} s"
        if self._is_body_arriving:
            assert self._body is not None
            self._body.set_exception(SlowBodyError(message))
        else:
            self.transport.write(refusal(ApiError(408, message, code="timeout")))
            self.force_close()

    def _watch(self) -> None:
        """Looks twice in the time in which something must move."""
        self._timer = asyncio.get_running_loop().call_later(self._limits.client_timeout / 2, self._check)

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
        if request is not None and not request.content.is_eof() and self._arrival.paused is None:
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


def refusal(error: ApiError) -> bytes:
    """A whole response, for what has no request."""
    response = error_response(error)
    assert isinstance(response.body, bytes)
    names = [*HEADERS, *(["Retry-After"] if error.retry_after is not None else [])]
    headers = "".join(f"{name}: {response.headers[name]}\r\n" for name in names)
    reason = HTTPStatus(error.status).phrase
    return REFUSED % (error.status, reason.encode(), headers.encode(), len(response.body), response.body)


@dataclass(slots=True, eq=False)
class Slot:
    """The place of one connection, from when it is accepted. is_opening: its TLS handshake is not over yet."""

    limits: ConnectionLimits
    address: str
    is_opening: bool = False
    is_held: bool = True

    def release(self) -> None:
        """The connection is gone. Another call changes nothing."""
        if self.is_held:
            self.is_held = False
            self.limits.leave(self)


class ConnectionLimits:
    """How many connections there may be at once, in all and from one address, and how long one waits for its client.

    most_of_address: 0 for no limit. client_timeout, receive_timeout: seconds; 0 of the latter for any. num_cut:
    connections that were cut off. num_late: requests that came too slowly. num_refused: connections that were too many.
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
        self._slots: set[Slot] = set()
        self._num_of_address: Counter[str] = Counter()

    @property
    def num_open(self) -> int:
        """Those in their handshake too."""
        return len(self._slots)

    @property
    def num_opening(self) -> int:
        return sum(slot.is_opening for slot in self._slots)

    def enter(self, address: str) -> Slot:
        """The place of another connection. Raises ApiError when there are too many."""
        if self.num_open >= self.most:
            self.num_refused += 1
            raise ApiError(503, "too many connections", code="overloaded", retry_after=1)
        if 0 < self.most_of_address <= self._num_of_address[address]:
            self.num_refused += 1
            message = f"too many connections from one address: limits.max_address_connections is {self.most_of_address}"
            raise ApiError(429, message, code="overloaded", retry_after=1)
        slot = Slot(self, address)
        self._slots.add(slot)
        self._num_of_address[address] += 1
        return slot

    def leave(self, slot: Slot) -> None:
        self._slots.remove(slot)
        self._num_of_address[slot.address] -= 1
        if not self._num_of_address[slot.address]:
            del self._num_of_address[slot.address]

    def show(self, metrics: Metrics) -> None:
        """From now on they are metrics."""
        metrics.watch_gauge("http_connections", "open HTTP connections", lambda: self.num_open)
        metrics.watch_count("http_connections_cut", "whose client neither sent nor took data", lambda: self.num_cut)
        metrics.watch_count("http_requests_late", "that came too slowly", lambda: self.num_late)
        metrics.watch_gauge("tls_handshakes", "connections in their TLS handshake", lambda: self.num_opening)
        metrics.watch_count("http_connections_refused", "more than may be open at once", lambda: self.num_refused)


def connection_limits(most: int, config: LimitsConfig) -> ConnectionLimits:
    return ConnectionLimits(most, config.client_timeout, config.max_address_connections, config.receive_timeout)


def create_runner(app: web.Application, shutdown_timeout: float = 5.0) -> web.AppRunner:
    """Serves the app to connections that an `Acceptor` makes. Handlers of clients that are gone are cancelled."""
    return web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=shutdown_timeout)
