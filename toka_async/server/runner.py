"""The aiohttp runner of the app: its options, and JSON for requests that are not even HTTP.

Knows aiohttp's low-level server.
"""

from __future__ import annotations

import logging
from typing import Any

from aiohttp import web

from toka_async.openai.errors import ApiError
from toka_async.server.errors import error_response

logger = logging.getLogger(__name__)

LINGER = 2.0  # seconds for the rest of a body that nobody wants, so that its sender gets to see why


class Connection(web.RequestHandler):
    """A connection whose protocol errors are JSON too."""

    __slots__ = ()

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


class Server(web.Server):
    """Makes such connections."""

    def __call__(self) -> web.RequestHandler:
        return Connection(self, loop=self._loop, **self._kwargs)


class Runner(web.AppRunner):
    """Serves an app: handlers of clients that are gone are cancelled."""

    def __init__(self, app: web.Application, shutdown_timeout: float = 5.0) -> None:
        super().__init__(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=shutdown_timeout, lingering_time=LINGER
        )

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        options: dict[str, Any] = made._kwargs
        return Server(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            loop=made._loop,
            **options,
        )
