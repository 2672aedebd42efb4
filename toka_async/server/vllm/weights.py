"""vLLM's routes by which a trainer gives the engine new weights, and prime-rl's form of one of them."""

from __future__ import annotations

import asyncio
from base64 import b64decode
from binascii import Error
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, UnsetType, field

from toka_async.control import (
    Broadcast,
    CudaBucket,
    CudaHandle,
    Directory,
    GroupTransfer,
    NcclTransfer,
    ShmBucket,
    Source,
    Transfer,
)
from toka_async.openai.errors import ApiError, bad_request
from toka_async.openai.fields import Unsupported
from toka_async.openai.parse import parse_fields
from toka_async.openai.requests import WireRequest
from toka_async.server.engine.control import EngineControl
from toka_async.server.http.receive import read_optional, read_request
from toka_async.server.http.respond import SERVICE, json_response
from toka_async.server.vllm.control import NothingRequest

NAME = "vllm"  # of the transfer: there is one
ID_BYTES = 128
MOST_OFFSET = 2**62

Port = Annotated[int, Meta(ge=1, le=65535)]
Text = Annotated[str, Meta(min_length=1, max_length=4096)]
Size = Annotated[int, Meta(ge=0, le=MOST_OFFSET)]
Shapes = list[list[Size]]
Version = Annotated[str, Meta(min_length=1, max_length=256)]
Seconds = Annotated[float, Meta(gt=0, le=10**6)]


class TransferInfo(WireRequest, frozen=True, kw_only=True):
    """What the ranks need to know to join the trainer's communicator. backend: `gloo` is a group of torch.distributed,
    for ranks on CPUs. timeout: seconds that they wait for the trainer.
    """

    unsupported: ClassVar[Unsupported] = {"packed_num_buffers": (1, 2)}  # of the trainer's own

    master_address: Text | None = None
    master_port: Port | None = None
    nccl_unique_id_b64: Text | None = None
    rank_offset: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    world_size: Annotated[int, Meta(ge=2, le=2**31 - 1)]
    packed: bool = False
    packed_buffer_size_bytes: Annotated[int, Meta(ge=1, le=MOST_OFFSET)] = 1 << 30
    backend: Literal["nccl", "gloo"] = "nccl"
    timeout: Seconds | None = None


class OpenRequest(WireRequest, frozen=True, kw_only=True):
    """POST /init_weight_transfer_engine."""

    init_info: TransferInfo


class StartRequest(WireRequest, frozen=True, kw_only=True):
    """POST /start_weight_update."""

    unsupported: ClassVar[Unsupported] = {"is_checkpoint_format": (True,)}


class SharedMemory(WireRequest, frozen=True, kw_only=True):
    """The file `name` of /dev/shm, with each tensor at its offset in bytes."""

    name: Text
    offsets: list[Size]


class SharedGpu(WireRequest, frozen=True, kw_only=True):
    """Memory of a GPU that the trainer shares: torch's `UntypedStorage._share_cuda_`, its bytes in base64."""

    gpu: Text
    handle: Text
    size: Size
    offset: Size
    counter: str
    counter_offset: Size
    event: str
    waits: bool


class SharedGpus(WireRequest, frozen=True, kw_only=True):
    """A rank reads from its own GPU; each tensor is at its offset in bytes."""

    handles: Annotated[list[SharedGpu], Meta(min_length=1)]
    offsets: list[Size]


class UpdateInfo(WireRequest, frozen=True, kw_only=True):
    """Tensors of a checkpoint, by their names in it. They come over the open transfer, unless `shm` or `cuda` says
    where they are. packed: they come in chunks, whatever was said when the transfer was opened.
    """

    unsupported: ClassVar[Unsupported] = {
        # A pickle runs whatever is in it.
        "ipc_handles": (),
        "ipc_handles_pickled": (),
        "tensor_sizes": (),
        "num_updates_list": (),
        "sizes": (),
    }

    names: Annotated[list[Text], Meta(min_length=1)]
    dtype_names: list[Text]
    shapes: Shapes
    packed: bool = False
    shm: SharedMemory | None = None
    cuda: SharedGpus | None = None


class UpdateRequest(WireRequest, frozen=True, kw_only=True):
    """POST /update_weights: tensors of an update that was started, or all files of a folder (prime-rl's form)."""

    update_info: UpdateInfo | list[UpdateInfo] | None = None
    weight_dir: Text | None = None


class FinishRequest(WireRequest, frozen=True, kw_only=True):
    """POST /finish_weight_update."""

    weight_version: Version | None = None


class VersionRequest(WireRequest, frozen=True, kw_only=True):
    """POST /update_weight_version, vLLM's and SGLang's. SGLang aborts requests unless told not to; here they go on
    unless told so.
    """

    new_version: Version
    abort_all_requests: bool = False


class CheckRequest(WireRequest, frozen=True, kw_only=True):
    """POST /weight_checker."""

    action: Literal["checksum", "compare"]
    baseline: dict[str, str] | None = None


class RpcRequest(WireRequest, frozen=True, kw_only=True):
    """POST /collective_rpc: the methods that SkyRL adds to vLLM's workers."""

    unsupported: ClassVar[Unsupported] = {"args": ([],)}

    method: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    timeout: Seconds | None = None


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """status: for prime-rl."""

    message: str
    status: Literal["ok"] = "ok"


class VersionSet(msgspec.Struct, frozen=True, kw_only=True):
    success: Literal[True] = True
    new_version: str
    message: str


class WeightsChecked(msgspec.Struct, frozen=True, kw_only=True):
    """checksums: of an action `checksum`, by tensor; the others of `compare`."""

    checksums: dict[str, str] | UnsetType = UNSET
    match: bool | UnsetType = UNSET
    mismatches: list[str] | UnsetType = UNSET


class RpcResults(msgspec.Struct, frozen=True):
    results: list[None]


def control_of(request: web.Request) -> EngineControl:
    return request.app[SERVICE].engine.control


async def init_weight_transfer_engine(request: web.Request) -> web.Response:
    """Joins the trainer's communicator with all ranks; the trainer has to join it meanwhile."""
    wire = await read_request(request, OpenRequest)
    await control_of(request).open_transfer(make_transfer(wire.init_info), wire.init_info.timeout)
    return json_response(Told(message="Weight transfer initialized"))


async def shutdown_weight_transfer_engine(request: web.Request) -> web.Response:
    await read_optional(request, NothingRequest)
    await control_of(request).close_transfer(NAME)
    return json_response(Told(message="Weight transfer shut down"))


async def start_weight_update(request: web.Request) -> web.Response:
    """From here on nothing is computed until the update is finished, or has failed."""
    await read_optional(request, StartRequest)
    await control_of(request).begin_update()
    return json_response(Told(message="Weight update started"))


async def update_weights(request: web.Request) -> web.Response:
    wire = await read_request(request, UpdateRequest)
    await load(control_of(request), wire)
    return json_response(Told(message="Weights updated"))


async def finish_weight_update(request: web.Request) -> web.Response:
    wire = await read_optional(request, FinishRequest)
    await control_of(request).finish_update(wire.weight_version)
    return json_response(Told(message="Weight update finished"))


async def update_weight_version(request: web.Request) -> web.Response:
    wire, control = await read_request(request, VersionRequest), control_of(request)
    if wire.abort_all_requests:
        await control.abort()
    await control.set_version(wire.new_version)
    return json_response(VersionSet(new_version=wire.new_version, message=f"the version is {wire.new_version}"))


async def weight_checker(request: web.Request) -> web.Response:
    """Sums up every tensor, or compares the sums with those that were taken before."""
    wire = await read_request(request, CheckRequest)
    baseline = wire.baseline
    if (wire.action == "compare") != (baseline is not None):
        raise bad_request("'baseline' is needed by the action compare, and by no other", param="baseline")
    sums = await control_of(request).checksum()
    if baseline is None:
        return json_response(WeightsChecked(checksums=sums))
    wrong = sorted(name for name in sums.keys() | baseline.keys() if sums.get(name) != baseline.get(name))
    return json_response(WeightsChecked(match=not wrong, mismatches=wrong))


async def collective_rpc(request: web.Request) -> web.Response:
    wire, control = await read_request(request, RpcRequest), control_of(request)
    try:
        async with asyncio.timeout(wire.timeout):
            match wire.method:
                case "skyrl_start_weight_update":
                    parse_fields(wire.kwargs, StartRequest)
                    await control.begin_update()
                case "update_weights_nccl" | "update_weights_ipc":
                    await load(control, parse_fields(wire.kwargs, UpdateRequest))
                case "skyrl_finish_weight_update":
                    await control.finish_update(parse_fields(wire.kwargs, FinishRequest).weight_version)
                case _:
                    raise bad_request(f"'method' {wire.method[:64]!r} is not supported", param="method")
    except TimeoutError:
        raise ApiError(504, f"it took longer than the timeout ({wire.timeout:g} s)", code="timeout") from None
    return json_response(RpcResults([None] * control.world_size))


async def load(control: EngineControl, wire: UpdateRequest) -> None:
    """Raises ApiError (400) or ControlError."""
    infos = [wire.update_info] if isinstance(wire.update_info, UpdateInfo) else wire.update_info
    if (infos is None) == (wire.weight_dir is None):
        raise bad_request("give either 'update_info' or 'weight_dir'", param="update_info")
    for info in infos or ():
        await control.load(make_source(info), info.names, info.dtype_names, info.shapes)
    if wire.weight_dir is not None:
        await load_directory(control, wire.weight_dir)


async def load_directory(control: EngineControl, path: str, version: str | None = None) -> None:
    """A whole update, or a part of the one that is open. Raises ControlError."""
    is_whole = not control.is_updating
    if is_whole:
        await control.begin_update()
    await control.load(Directory(path=path))
    if is_whole:
        await control.finish_update(version)


def make_transfer(info: TransferInfo) -> Transfer:
    """Raises ApiError (400), which names the field."""
    address, port, given = info.master_address, info.master_port, info.nccl_unique_id_b64
    if (address is None) != (port is None) or (address is None) == (given is None):
        raise bad_request(
            "'init_info' needs master_address and master_port, or nccl_unique_id_b64; memory that is shared needs none",
            param="init_info",
        )
    if info.backend == "gloo":
        if address is None or port is None or info.packed:
            raise bad_request("'init_info.backend' gloo needs an address, and no packed", param="init_info.backend")
        return GroupTransfer(
            name=NAME,
            address=address,
            port=port,
            rank_offset=info.rank_offset,
            world_size=info.world_size,
            backend="gloo",
        )
    unique_id = b"" if given is None else decode(given, "init_info.nccl_unique_id_b64")
    if given is not None and len(unique_id) != ID_BYTES:
        raise bad_request(
            f"'init_info.nccl_unique_id_b64' must have {ID_BYTES} bytes", param="init_info.nccl_unique_id_b64"
        )
    return NcclTransfer(
        name=NAME,
        address=address or "",
        port=port or 0,
        unique_id=unique_id,
        rank_offset=info.rank_offset,
        world_size=info.world_size,
        packed=info.packed,
        buffer_bytes=info.packed_buffer_size_bytes,
    )


def make_source(info: UpdateInfo) -> Source:
    """Raises ApiError (400), which names the field."""
    if info.shm is not None and info.cuda is not None:
        raise bad_request("give 'update_info.shm' or cuda, not both", param="update_info.shm")
    if info.shm is not None:
        return ShmBucket(name=info.shm.name, offsets=tuple(info.shm.offsets))
    if info.cuda is not None:
        return CudaBucket(handles=make_handles(info.cuda.handles), offsets=tuple(info.cuda.offsets))
    return Broadcast(transfer=NAME, buffer_bytes=(1 << 30) if info.packed else -1)


def make_handles(handles: Sequence[SharedGpu]) -> tuple[CudaHandle, ...]:
    where = "update_info.cuda.handles"
    return tuple(
        CudaHandle(
            gpu=each.gpu,
            handle=decode(each.handle, where),
            size=each.size,
            offset=each.offset,
            counter=decode(each.counter, where),
            counter_offset=each.counter_offset,
            event=decode(each.event, where),
            waits=each.waits,
        )
        for each in handles
    )


def decode(text: str, param: str) -> bytes:
    try:
        return b64decode(text, validate=True)
    except (Error, ValueError):
        raise bad_request(f"'{param}' is no base64", param=param) from None
