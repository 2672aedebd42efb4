"""vLLM's routes by which a trainer pauses the engine and aborts requests."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec
from aiohttp import web
from msgspec import Meta, field

from toka_async.openai.fields import Unsupported
from toka_async.openai.requests import WireRequest
from toka_async.openai.schemas import Schema
from toka_async.server.http.query import Query
from toka_async.server.http.receive import read_optional
from toka_async.server.http.respond import SERVICE, json_response

VllmPauseMode = Literal["abort", "wait", "keep"]
MODES: tuple[VllmPauseMode, ...] = ("abort", "wait", "keep")
PAUSE_QUERY: dict[str, Schema] = {
    "mode": {"enum": list(MODES), "default": "abort"},
    "clear_cache": {"type": "boolean", "default": True},
}
RESET_QUERY: dict[str, Schema] = {
    name: {"type": "boolean", "default": False} for name in ("reset_running_requests", "reset_external")
}


class Done(msgspec.Struct, frozen=True):
    status: Literal["paused", "resumed"]


class NothingRequest(WireRequest, frozen=True, kw_only=True):
    """A route that needs no body; clients send an empty object, or none."""


class AbortRequest(WireRequest, frozen=True, kw_only=True):
    """POST /abort_requests. Without ids all requests are meant."""

    request_ids: list[Annotated[str, Meta(min_length=1)]] = field(default_factory=list)


class Aborted(msgspec.Struct, frozen=True, kw_only=True):
    """aborted: requests (one a prompt)."""

    status: Literal["aborted"] = "aborted"
    aborted: int


class ResetRequest(WireRequest, frozen=True, kw_only=True):
    """POST /reset_prefix_cache: the parameters may be in a body too."""

    unsupported: ClassVar[Unsupported] = {"reset_external": (False, True)}  # there is no cache elsewhere

    reset_running_requests: bool = False


class Success(msgspec.Struct, frozen=True):
    success: bool


async def pause(request: web.Request) -> web.Response:
    """Answers when nothing is computed any more. Requests that come meanwhile wait."""
    query, control = Query(request, PAUSE_QUERY), request.app[SERVICE].engine.control
    mode = query.choice("mode", MODES, "abort")
    await read_optional(request, NothingRequest)
    await control.pause(mode)
    if mode != "keep" and query.flag("clear_cache", default=True):
        await control.reset_prefix_cache()
    return json_response(Done("paused"))


async def resume(request: web.Request) -> web.Response:
    await read_optional(request, NothingRequest)
    await request.app[SERVICE].engine.control.resume()
    return json_response(Done("resumed"))


async def abort_requests(request: web.Request) -> web.Response:
    """Ends requests with the tokens that they have; those of `request_ids`, or all."""
    wire = await read_optional(request, AbortRequest)
    return json_response(Aborted(aborted=await request.app[SERVICE].engine.control.abort(wire.request_ids or None)))


async def reset_prefix_cache(request: web.Request) -> web.Response:
    """Forgets cached prompts. With `reset_running_requests` running requests compute theirs again too."""
    query, control = Query(request, RESET_QUERY), request.app[SERVICE].engine.control
    wire = await read_optional(request, ResetRequest)
    query.flag("reset_external", default=False)  # there is no cache elsewhere
    if wire.reset_running_requests or query.flag("reset_running_requests", default=False):
        await control.restart_requests()
    else:
        await control.reset_prefix_cache()
    return json_response(Success(success=True))
