"""vLLM's routes by which a trainer on the same GPUs gets the memory of the cache for a while. Weights stay."""

from __future__ import annotations

from typing import Literal

import msgspec
from aiohttp import web

from toka_async.openai.schemas import Schema
from toka_async.server.http.query import Query
from toka_async.server.http.receive import read_optional
from toka_async.server.http.respond import SERVICE, json_response
from toka_async.server.vllm.control import MODES, NothingRequest

LEVELS = ("0", "1", "2")
PARTS = ("weights", "kv_cache", "scheduling")
TAGS: dict[str, Schema] = {"tags": {"type": "array", "items": {"enum": list(PARTS)}}}
SLEEP_QUERY: dict[str, Schema] = {
    "level": {"enum": [0, 1, 2], "default": 1},
    "mode": {"enum": list(MODES), "default": "abort"},
    **TAGS,
}


class Slept(msgspec.Struct, frozen=True, kw_only=True):
    status: Literal["sleeping"] = "sleeping"
    level: int


class Woken(msgspec.Struct, frozen=True, kw_only=True):
    status: Literal["awake", "sleeping"]
    tags: list[str] | None


class Released(msgspec.Struct, frozen=True):
    status: Literal["kv_cache_released"] = "kv_cache_released"


class SleepInfo(msgspec.Struct, frozen=True):
    is_sleeping: bool


async def sleep(request: web.Request) -> web.Response:
    """Pauses, and gives the memory of the cache back from level 1 on. There is no level 2: weights stay."""
    query = Query(request, SLEEP_QUERY, TAGS)
    level, mode = int(query.choice("level", LEVELS, "1")), query.choice("mode", MODES, "abort")
    query.choices("tags", PARTS)
    await read_optional(request, NothingRequest)
    await request.app[SERVICE].engine.control.sleep(level, mode)
    return json_response(Slept(level=level))


async def wake_up(request: web.Request) -> web.Response:
    """Takes the memory of the cache again and goes on. Weights are awake always: waking them alone changes nothing."""
    tags, control = Query(request, TAGS, TAGS).choices("tags", PARTS), request.app[SERVICE].engine.control
    await read_optional(request, NothingRequest)
    if not tags or "kv_cache" in tags:
        await control.wake()
    if not control.is_asleep:
        await control.resume()
    return json_response(Woken(status="sleeping" if control.is_asleep else "awake", tags=tags or None))


async def is_sleeping(request: web.Request) -> web.Response:
    return json_response(SleepInfo(request.app[SERVICE].engine.control.is_asleep))


async def release_kv_cache_memory(request: web.Request) -> web.Response:
    """After a pause: gives the memory back; requests that were kept compute their prompts again."""
    await read_optional(request, NothingRequest)
    await request.app[SERVICE].engine.control.sleep(1, "retract")
    return json_response(Released())
