"""Logs every HTTP request for operators: its id, status and duration.

An id comes from the client (`X-Request-Id`) or is made; the answer and all log lines about the request carry it. Knows
no bodies: prompts and answers are never logged.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections import Counter
from time import monotonic

from aiohttp import web

from toka_async.logs import request_id, request_tokens
from toka_async.server.access.errors import FAULT, Handler
from toka_async.server.engine.metrics import Metrics

logger = logging.getLogger(__name__)

HEADER = "X-Request-Id"
ID: web.RequestKey[str] = web.RequestKey("id", str)
MOST_REASON = 200  # characters of a logged error message
COUNTED = {401, 403, 429}  # only counted in the metrics: load or strangers cause many of them
GONE = 499  # the client left before the answer; nginx' status

_VALID = re.compile(r"[\x21-\x7e]{1,128}")


class AccessLog:
    """Counts requests, and logs errors that a client has to fix, with the reason. log: log every request."""

    def __init__(self, metrics: Metrics, log: bool) -> None:
        self._metrics = metrics
        self._log = log

    def install(self, app: web.Application) -> None:
        """Must be called before the app's other middlewares are added: this one is around them."""

        @web.middleware
        async def observe(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._observe(request, handler)

        app.middlewares.append(observe)
        app.on_response_prepare.append(tell_id)

    async def _observe(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get(HEADER, "")
        about = request[ID] = given if _VALID.fullmatch(given) else secrets.token_hex(16)
        token, began, status = request_id.set(about), monotonic(), GONE
        tokens = Counter[str]()
        counting = request_tokens.set(tokens)
        try:
            response = await handler(request)
            status = response.status
            return response
        finally:
            self._note_end(request, status, monotonic() - began, tokens)
            request_tokens.reset(counting)
            request_id.reset(token)

    def _note_end(self, request: web.Request, status: int, seconds: float, tokens: Counter[str]) -> None:
        resource = request.match_info.route.resource
        path = "other" if resource is None else resource.canonical
        self._metrics.http_ended(path, status)
        fault = request.get(FAULT) if resource is not None else None  # a 404 would quote the path, which may be private
        if self._log or (fault is not None and 400 <= status < 500 and status not in COUNTED):
            fields = {"method": request.method, "path": path, "status": status, "seconds": round(seconds, 6), **tokens}
            line = f"{request.method} {path} {status} in {seconds:.3f} s"
            if tokens:
                line += f", {tokens['prompt_tokens']:,} prompt and {tokens['output_tokens']:,} output tokens"
            if fault is not None:
                fields["reason"] = fault.logged[:MOST_REASON]
                line += f": {fields['reason']}"
            logger.info("%s", line, extra={"fields": fields})


async def tell_id(request: web.Request, response: web.StreamResponse) -> None:
    """Sends the id with every answer."""
    if ID in request:
        response.headers[HEADER] = request[ID]
