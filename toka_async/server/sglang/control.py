"""SGLang's routes by which a trainer pauses the engine and aborts requests."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec
from aiohttp import web

from toka_async.control import PauseMode
from toka_async.openai.errors import bad_request
from toka_async.openai.fields import Unsupported
from toka_async.openai.requests import WireRequest
from toka_async.server.http.query import Query
from toka_async.server.http.receive import read_optional
from toka_async.server.http.respond import SERVICE, json_response
from toka_async.server.sglang.weights import OPEN_UPDATE

MODES: dict[str, PauseMode] = {"abort": "abort", "retract": "retract", "in_place": "keep"}
FLUSH_QUERY = {"timeout": {"type": "number", "minimum": 0, "default": 0}}


class SglangDone(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    status: Literal["ok"] = "ok"


class SglangPause(WireRequest, frozen=True, kw_only=True):
    """POST /pause_generation."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class SglangContinue(WireRequest, frozen=True, kw_only=True):
    """POST /continue_generation. Nothing is allocated while weights change: torch's cache has nothing to give back."""

    unsupported: ClassVar[Unsupported] = {"torch_empty_cache": (True, False)}


class SglangAbort(WireRequest, frozen=True, kw_only=True):
    """POST /abort_request: the requests of an id, or all."""

    rid: str = ""
    abort_all: bool = False


async def pause_generation(request: web.Request) -> web.Response:
    """Answers when nothing is computed any more. Requests that come meanwhile wait."""
    wire = await read_optional(request, SglangPause)
    await request.app[SERVICE].engine.control.pause(MODES[wire.mode])
    return json_response(SglangDone(message="generation is paused"))


async def continue_generation(request: web.Request) -> web.Response:
    """Ends the pause; parts of an update that came in it are the whole update now."""
    await read_optional(request, SglangContinue)
    control = request.app[SERVICE].engine.control
    if control.is_updating:
        await control.finish_update(request.app[OPEN_UPDATE].version)
    await control.resume()
    return json_response(SglangDone(message="generation goes on"))


async def flush_cache(request: web.Request) -> web.Response:
    """Forgets cached prompts, whether requests run or not: those keep theirs, and nobody else finds them. So there is
    nothing to wait for, and `timeout` is not needed.
    """
    Query(request, FLUSH_QUERY).check_seconds("timeout")
    await request.app[SERVICE].engine.control.reset_prefix_cache()
    return web.Response(text="the cache is flushed\n")


async def abort_request(request: web.Request) -> web.Response:
    """Ends requests with the tokens that they have."""
    wire = await read_optional(request, SglangAbort)
    if bool(wire.rid) == wire.abort_all:
        raise bad_request("give either 'rid' or abort_all: true", param="rid")
    count = await request.app[SERVICE].engine.control.abort(None if wire.abort_all else [wire.rid])
    return json_response(SglangDone(message=f"{count} requests are aborted"))
