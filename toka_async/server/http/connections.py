"""HTTP connections: JSON also for what is not even HTTP; the runner of the app. Knows aiohttp's low-level server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from aiohttp import web

from toka_async.openai.errors import ApiError
from toka_async.server.access.errors import HEADERS, make_error_response

logger = logging.getLogger(__name__)

LINGER = 2.0  # seconds for the rest of a body that nobody wants, so that its sender gets to see why
REFUSED = b"HTTP/1.1 %d %s\r\nContent-Type: application/json\r\n%sConnection: close\r\nContent-Length: %d\r\n\r\n%s"


class HttpConnection(web.RequestHandler):
    """A connection whose protocol errors are JSON too.

    A client that closes its side while it waits for an answer has left: its request is cancelled. HTTP cannot tell it
    from one that only says that it will send no more (`nc -N`), and generating for nobody is worse.

    Args:
        client_timeout: seconds for a request's header to arrive, from the connection's start or the last answer.
        on_lost: called once the connection is gone.
    """

    __slots__ = ("_on_lost",)

    def __init__(self, server: web.Server, client_timeout: float, on_lost: Callable[[], object]) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # none is kept
            lingering_time=LINGER,
            auto_decompress=False,
            keepalive_timeout=client_timeout,
        )
        self._on_lost = on_lost

    def connection_lost(self, exc: BaseException | None) -> None:
        self._on_lost()
        super().connection_lost(exc)

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
        response = make_error_response(ApiError(status, what))
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kwargs: Any) -> None:
        """As the framework's own, but not for a body that cannot be read: its sender has been told."""
        if not isinstance(kwargs.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **kwargs)


def refusal(error: ApiError) -> bytes:
    """A whole response, for what has no request."""
    response = make_error_response(error)
    assert isinstance(response.body, bytes)
    names = [*HEADERS, *(["Retry-After"] if error.retry_after is not None else [])]
    headers = "".join(f"{name}: {response.headers[name]}\r\n" for name in names)
    reason = HTTPStatus(error.status).phrase
    return REFUSED % (error.status, reason.encode(), headers.encode(), len(response.body), response.body)


def create_runner(app: web.Application, shutdown_timeout: float = 5.0) -> web.AppRunner:
    """Serves the app to connections that an `Acceptor` makes. Handlers of clients that are gone are cancelled."""
    return web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=shutdown_timeout)
