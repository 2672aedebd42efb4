"""SGLang's routes by which a trainer gives the engine new weights."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, UnsetType, field

from toka_async.arrays import Float32
from toka_async.control import Broadcast, GroupTransfer
from toka_async.openai.errors import bad_request
from toka_async.openai.fields import Unsupported
from toka_async.openai.requests import WireRequest
from toka_async.openai.schemas import Schema
from toka_async.server.engine.control import ControlError, ControlTimeoutError, EngineControl
from toka_async.server.generate.events import ENCODER
from toka_async.server.http.receive import read_optional, read_request
from toka_async.server.http.respond import SERVICE, json_response
from toka_async.server.vllm.weights import MOST_OFFSET, Seconds, Shapes, Text, Version, control_of, load_directory

GROUP = "weight_update_group"
LARGEST_PORT = 65535
ROWS: Schema = {"type": "array", "items": {"type": ["number", "array", "null"]}}

HINTS: Unsupported = {
    # Cached prompts are never found with other weights, whatever is asked for.
    "flush_cache": (True, False),
    # Nothing is allocated while weights change, and graphs stay valid.
    "torch_empty_cache": (True, False),
    "recapture_cuda_graph": (True, False),
    "selector": ("all", "target"),
}


@dataclass(slots=True)
class OpenUpdate:
    """Of an update whose end a client says by going on: the version that its last part has named."""

    version: str | None = None


@dataclass(slots=True)
class Nap:
    """resumes: the engine was not paused when it fell asleep, so it goes on when it wakes."""

    resumes: bool = False


OPEN_UPDATE: web.AppKey[OpenUpdate] = web.AppKey("open_update", OpenUpdate)
NAP: web.AppKey[Nap] = web.AppKey("nap", Nap)


class GroupRequest(WireRequest, frozen=True, kw_only=True):
    """POST /init_weights_update_group. AReaL sends the port as a text. timeout: seconds to wait for the trainer."""

    unsupported: ClassVar[Unsupported] = {"pp_rank": (0,)}  # groups of single stages

    master_address: Text
    master_port: Annotated[int, Meta(ge=1, le=LARGEST_PORT)] | Annotated[str, Meta(pattern="^[0-9]{1,5}$")]
    rank_offset: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    world_size: Annotated[int, Meta(ge=2, le=2**31 - 1)]
    group_name: Text = GROUP
    backend: Literal["nccl", "gloo"] = "nccl"
    timeout: Seconds | None = None


class LeaveRequest(WireRequest, frozen=True, kw_only=True):
    """POST /destroy_weights_update_group."""

    group_name: Text = GROUP


class DistributedRequest(WireRequest, frozen=True, kw_only=True):
    """POST /update_weights_from_distributed."""

    unsupported: ClassVar[Unsupported] = HINTS

    names: Annotated[list[Text], Meta(min_length=1)]
    dtypes: list[Text]
    shapes: Shapes
    group_name: Text = GROUP
    abort_all_requests: bool = False
    weight_version: Version | None = None
    load_format: Literal["flattened_bucket"] | None = None


class DiskRequest(WireRequest, frozen=True, kw_only=True):
    """POST /update_weights_from_disk."""

    unsupported: ClassVar[Unsupported] = {
        **HINTS,
        "load_format": ("auto", "safetensors"),
        "is_async": (False,),
        "token_step": (0,),
        "manifest": ({},),
    }

    model_path: Text
    abort_all_requests: bool = False
    weight_version: Version | None = None
    keep_pause: bool = False


class BeginRequest(WireRequest, frozen=True, kw_only=True):
    """POST /begin_weight_update."""

    unsupported: ClassVar[Unsupported] = {"selector": ("all", "target")}


class EndRequest(WireRequest, frozen=True, kw_only=True):
    """POST /end_weight_update."""


class SumsRequest(WireRequest, frozen=True, kw_only=True):
    """POST /weights_checker."""

    unsupported: ClassVar[Unsupported] = {
        "allow_quant_error": (False,),
        "skip_tensor_list": ([],),
        "selector": ("all", "target"),
    }

    action: Literal["checksum"] = "checksum"


class TensorRequest(WireRequest, frozen=True, kw_only=True):
    """GET and POST /get_weights_by_name. truncate_size: rows, from the first one on."""

    name: Text
    truncate_size: Annotated[int, Meta(ge=1, le=2**31 - 1)] = 100


class TagsRequest(WireRequest, frozen=True, kw_only=True):
    """POST /release_memory_occupation and /resume_memory_occupation. Weights stay, so they cannot be named alone."""

    tags: list[Literal["weights", "kv_cache", "cuda_graph"]] = field(default_factory=list)


class UpdateOutcome(msgspec.Struct, frozen=True, kw_only=True):
    success: bool
    message: str
    num_paused_requests: int | UnsetType = UNSET


class RankSums(msgspec.Struct, frozen=True):
    checksums: dict[str, str]


class Sums(msgspec.Struct, frozen=True, kw_only=True):
    """ranks: one entry, with the sums of whole tensors."""

    success: Literal[True] = True
    message: str = "the sums of all tensors"
    ranks: list[RankSums]


async def init_weights_update_group(request: web.Request) -> web.Response:
    """Joins the trainer's group with all ranks; the trainer has to join it meanwhile."""
    wire, control = await read_request(request, GroupRequest), control_of(request)
    port = int(wire.master_port)
    if not 1 <= port <= LARGEST_PORT:
        raise bad_request(f"'master_port' must be 1 to {LARGEST_PORT}", param="master_port")
    transfer = GroupTransfer(
        name=wire.group_name,
        address=wire.master_address.strip("[]"),
        port=port,
        rank_offset=wire.rank_offset,
        world_size=wire.world_size,
        backend=wire.backend,
    )
    return await tell(control.open_transfer(transfer, wire.timeout), "the group is open")


async def destroy_weights_update_group(request: web.Request) -> web.Response:
    wire = await read_request(request, LeaveRequest)
    return await tell(control_of(request).close_transfer(wire.group_name), "the group is closed")


async def update_weights_from_distributed(request: web.Request) -> web.Response:
    """Tensors that the trainer broadcasts. While the client has paused the engine they are parts of one update, which
    ends with the pause; otherwise they are an update of their own.
    """
    wire, control, update = (
        await read_request(request, DistributedRequest),
        control_of(request),
        request.app[OPEN_UPDATE],
    )
    return await tell(load_broadcast(control, update, wire), "the weights are there")


async def load_broadcast(control: EngineControl, update: OpenUpdate, wire: DistributedRequest) -> None:
    if wire.abort_all_requests:
        await control.abort()
    is_own = not (control.is_paused or control.is_updating)
    if not control.is_updating:
        update.version = None
        await control.begin_update(partial=is_own)
    source = Broadcast(transfer=wire.group_name, buffer_bytes=-1 if wire.load_format is None else MOST_OFFSET)
    await control.load(source, wire.names, wire.dtypes, wire.shapes)
    update.version = wire.weight_version or update.version
    if is_own:
        await control.finish_update(wire.weight_version)


async def begin_weight_update(request: web.Request) -> web.Response:
    await read_optional(request, BeginRequest)
    request.app[OPEN_UPDATE].version = None
    return await tell(control_of(request).begin_update(), "the update has begun")


async def end_weight_update(request: web.Request) -> web.Response:
    await read_optional(request, EndRequest)
    version = request.app[OPEN_UPDATE].version
    return await tell(control_of(request).finish_update(version), "the update is complete")


async def update_weights_from_disk(request: web.Request) -> web.Response:
    """The safetensors files of a folder that all ranks see. With `keep_pause` the engine is paused afterwards."""
    wire, control = await read_request(request, DiskRequest), control_of(request)
    num_paused = request.app[SERVICE].engine.num_requests
    return await tell(load_files(control, wire), "the weights are there", num_paused)


async def load_files(control: EngineControl, wire: DiskRequest) -> None:
    if wire.abort_all_requests:
        await control.abort()
    if wire.keep_pause and not control.is_paused:
        await control.pause("keep")
    await load_directory(control, wire.model_path, wire.weight_version)


async def weights_checker(request: web.Request) -> web.Response:
    await read_optional(request, SumsRequest)
    return json_response(Sums(ranks=[RankSums(await control_of(request).checksum())]))


async def get_weights_by_name(request: web.Request) -> web.Response:
    """The first rows of a tensor: lists of numbers, and null where one is not finite."""
    wire = await read_request(request, TensorRequest)
    try:
        rows = await control_of(request).read_tensor(wire.name, wire.truncate_size)
    except ControlTimeoutError:
        raise
    except ControlError as error:
        raise bad_request(str(error)) from None
    executor = request.app[SERVICE].executor
    body = await asyncio.get_running_loop().run_in_executor(executor, encode_rows, rows)
    return web.Response(body=body, content_type="application/json")


def encode_rows(rows: Float32) -> bytes:
    """Encodes row by row, so that other threads have their turns."""
    return b"[" + b",".join(ENCODER.encode(row.tolist()) for row in rows) + b"]"


async def release_memory_occupation(request: web.Request) -> web.Response:
    """Gives the memory of the cache back. Requests wait, and compute their prompts again afterwards."""
    wire, control, nap = await read_optional(request, TagsRequest), control_of(request), request.app[NAP]
    check_tags(wire)
    if not control.is_asleep:
        nap.resumes = not control.is_paused
    return await tell(control.sleep(1, "retract"), "the memory of the cache is given back")


async def resume_memory_occupation(request: web.Request) -> web.Response:
    """Takes the memory again. Weights are there always: naming them alone changes nothing."""
    wire = await read_optional(request, TagsRequest)
    is_meant = not wire.tags or "kv_cache" in wire.tags
    if not is_meant:
        return json_response(UpdateOutcome(success=True, message="the weights are there"))
    return await tell(wake(control_of(request), request.app[NAP]), "the memory of the cache is there")


async def wake(control: EngineControl, nap: Nap) -> None:
    was_asleep = control.is_asleep
    await control.wake()
    if was_asleep and nap.resumes:
        await control.resume()


def check_tags(wire: TagsRequest) -> None:
    """Raises ApiError (400) where nothing is meant that can be released."""
    if wire.tags and "kv_cache" not in wire.tags:
        raise bad_request("'tags' must have kv_cache: weights stay on their devices", param="tags")


async def tell(work: Awaitable[None], message: str, num_paused: int | UnsetType = UNSET) -> web.Response:
    """Waits, and says in SGLang's form how it went."""
    try:
        await work
    except ControlError as error:
        return json_response(
            UpdateOutcome(success=False, message=str(error), num_paused_requests=num_paused), status=400
        )
    return json_response(UpdateOutcome(success=True, message=message, num_paused_requests=num_paused))
