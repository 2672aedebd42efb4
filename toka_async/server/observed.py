"""Every HTTP request as those see it who run the server: its id, how it was answered, how long that took.

An id comes from the client (`X-Request-Id`) or is made; the answer and all log lines about the request carry it. Knows
no bodies: nothing of what is asked or answered is logged.
"""

from __future__ import annotations

import logging
import re
import secrets
from time import monotonic

from aiohttp import web

from toka_async.logs import request_id
from toka_async.server.errors import Handler
from toka_async.server.metrics import Metrics

logger = logging.getLogger(__name__)

HEADER = "X-Request-Id"
ID: web.RequestKey[str] = web.RequestKey("id", str)
GONE = 499  # the status of a request whose client left before it was answered, as nginx has it

_VALID = re.compile(r"[\x21-\x7e]{1,128}")


class Observed:
    """Counts and perhaps logs requests. log: a line for each."""

    def __init__(self, metrics: Metrics, log: bool) -> None:
        self._metrics = metrics
        self._log = log

    def install(self, app: web.Application) -> None:
        """To be called before the app's other middlewares are added: this one is around them."""

        @web.middleware
        async def observe(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._observe(request, handler)

        app.middlewares.append(observe)
        app.on_response_prepare.append(tell_id)

    async def _observe(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get(HEADER, "")
        about = request[ID] = given if _VALID.fullmatch(given) else secrets.token_hex(16)
        token, began, status = request_id.set(about), monotonic(), GONE
        try:
            response = await handler(request)
            status = response.status
            return response
        finally:
            self._ended(request, status, monotonic() - began)
            request_id.reset(token)

    def _ended(self, request: web.Request, status: int, seconds: float) -> None:
        resource = request.match_info.route.resource
        path = "other" if resource is None else resource.canonical
        self._metrics.http_ended(path, status)
        if self._log:
            fields = {"method": request.method, "path": path, "status": status, "seconds": round(seconds, 6)}
            logger.info("%s %s %d in %.3f s", request.method, path, status, seconds, extra={"fields": fields})


async def tell_id(request: web.Request, response: web.StreamResponse) -> None:
    """The id goes back with every answer."""
    if ID in request:
        response.headers[HEADER] = request[ID]
