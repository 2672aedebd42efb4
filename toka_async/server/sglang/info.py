"""SGLang's routes that say what is served."""

from __future__ import annotations

import time
from typing import Literal

import msgspec
from aiohttp import web

from toka_async.openai.schemas import Schema
from toka_async.server.http.query import Query
from toka_async.server.http.respond import SERVICE, json_response

PARTS = ("core",)
LOADS_QUERY: dict[str, Schema] = {"include": {"enum": list(PARTS), "default": "core"}}


class ReplicaCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Of one replica; num_total_reqs is the sum of the other two."""

    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int


class Loads(msgspec.Struct, frozen=True, kw_only=True):
    """The part that SGLang calls `core`."""

    timestamp: float
    dp_rank_count: int
    loads: list[ReplicaCounts]


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    model_path: str
    served_model_name: str
    tokenizer_path: str
    weight_version: str
    is_generation: Literal[True] = True
    has_image_understanding: Literal[False] = False
    has_audio_understanding: Literal[False] = False


async def get_loads(request: web.Request) -> web.Response:
    """Counts sequences, which the schedulers are asked for; SGLang's clients wait for zero after an abort."""
    Query(request, LOADS_QUERY).choice("include", PARTS, "core")
    engine = request.app[SERVICE].engine
    await engine.replicas.refresh()
    counts = [
        ReplicaCounts(
            dp_rank=rank,
            num_running_reqs=each.stats.num_running,
            num_waiting_reqs=each.stats.num_waiting,
            num_total_reqs=each.stats.num_running + each.stats.num_waiting,
        )
        for rank, each in enumerate(engine.replicas.replicas)
    ]
    return json_response(Loads(timestamp=time.time(), dp_rank_count=len(engine.replicas.replicas), loads=counts))


async def get_model_info(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    version, name = service.engine.control.weight_version, service.name
    return json_response(
        ModelInfo(model_path=name, served_model_name=name, tokenizer_path=name, weight_version=version)
    )
