"""Answers every failure with OpenAI's JSON error, those of the web framework included."""

from __future__ import annotations

import asyncio
import difflib
import logging
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from toka_async.openai.errors import ApiError
from toka_async.server.engine.control import ControlError, ControlTimeoutError
from toka_async.server.engine.request_group import EngineStoppedError, RequestFailedError, TimedOutError
from toka_async.server.limits.jobs import NotServingError, OverloadedError

logger = logging.getLogger(__name__)

POLICY = "Content-Security-Policy"
HEADERS = {  # of every response: should a browser get to see one, it is to run nothing of it and show it nowhere
    "X-Content-Type-Options": "nosniff",
    POLICY: "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Server": "toka-async",
}

FAULT: web.RequestKey[ApiError] = web.RequestKey("fault", ApiError)  # of a request that was answered with an error

CLOSED: web.AppKey[frozenset[str]] = web.AppKey("closed", frozenset)  # paths that there could be

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def as_api_error(error: Exception) -> ApiError:
    """Turns an exception into the client's error. An unexpected one reveals nothing of the server's inside."""
    match error:
        case ApiError():
            return error
        case NotServingError():
            return ApiError(503, str(error), code="not_serving", retry_after=1)
        case OverloadedError():
            return ApiError(429, str(error), code="overloaded", retry_after=1)
        case TimedOutError() | ControlTimeoutError():
            return ApiError(504, str(error), code="timeout")
        case ControlError():
            return ApiError(409, str(error), code="control_failed")
        case RequestFailedError():
            return ApiError(400, str(error), code="request_failed")
        case EngineStoppedError():
            return ApiError(500, str(error), code="engine_stopped")
        case web.RequestPayloadError():
            return ApiError(400, f"the body cannot be read: {error}")
        case web.HTTPException():
            return ApiError(error.status, read_framework_message(error))
    return ApiError(500, "internal error; the server's log has the details", code="internal_error")


def read_framework_message(error: web.HTTPException) -> str:
    if isinstance(error, web.HTTPMethodNotAllowed):
        return f"method {error.method} is not allowed here, only {', '.join(sorted(error.allowed_methods))}"
    return error.reason


def make_no_route(request: web.Request) -> ApiError:
    """Makes a 404 that names the route that was meant, or all routes except the page's files."""
    routed = {resource.canonical for resource in request.app.router.resources()}
    paths = sorted(path for path in routed if not path.startswith("/page/"))
    asked = request.path[:256]
    if asked in request.app.get(CLOSED, ()):
        return ApiError(404, f"{asked} is closed: it needs a server with server.admin=true", code="admin_closed")
    near = difflib.get_close_matches(asked, paths, n=1, cutoff=0.8)
    lead = f"did you mean {near[0]}?" if near else f"there are {', '.join(paths)}"
    return ApiError(404, f"no such route: {asked!r}; {lead}", code="unknown_url")


def make_error_response(error: ApiError) -> web.Response:
    headers = dict(HEADERS)
    if error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.Response(
        status=error.status,
        body=msgspec.json.encode(error.response()),
        content_type="application/json",
        headers=headers,
    )


async def add_headers(_request: web.Request, response: web.StreamResponse) -> None:
    """Adds headers to every response before it is sent. A response may have a content policy of its own."""
    policy = response.headers.get(POLICY, HEADERS[POLICY])
    response.headers.update({**HEADERS, POLICY: policy})


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns exceptions into error responses."""
    try:
        return await handler(request)
    except (asyncio.CancelledError, ConnectionError):  # the client is gone
        raise
    except Exception as error:
        known = make_no_route(request) if isinstance(error, web.HTTPNotFound) else as_api_error(error)
        request[FAULT] = known
        if known.code == "internal_error":
            logger.exception("%s %s failed", request.method, request.rel_url.raw_path)  # encoded: it stays one line
        response = make_error_response(known)
        if isinstance(error, web.HTTPMethodNotAllowed):
            response.headers["Allow"] = error.headers["Allow"]
        if (
            isinstance(error, web.RequestPayloadError) or known.status == 408
        ):  # where the next request begins is unknown
            response.force_close()
        return response
