from __future__ import annotations

from base64 import b64encode
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.drivers.web_server import WebServer, web_server
from toka_async.control import (
    Broadcast,
    CudaBucket,
    Directory,
    GroupTransfer,
    LoadTensors,
    NcclTransfer,
    OpenTransfer,
    ShmBucket,
)

ADDRESS = {"master_address": "10.0.0.1", "master_port": 5000, "rank_offset": 1, "world_size": 3}
INFO = {"names": ["a", "b"], "dtype_names": ["bfloat16", "float32"], "shapes": [[2, 3], [4]]}
GPU = {
    "gpu": "GPU-1",
    "handle": b64encode(b"h").decode(),
    "size": 8,
    "offset": 0,
    "counter": b64encode(b"c").decode(),
    "counter_offset": 0,
    "event": "",
    "waits": False,
}


@pytest.fixture
async def server() -> AsyncIterator[WebServer]:
    async with web_server(admin=True) as running:
        yield running


def sent(server: WebServer) -> list[str]:
    return [type(action).__name__ for action in server.actions]


def loads(server: WebServer) -> list[LoadTensors]:
    return [action for action in server.actions if isinstance(action, LoadTensors)]


async def test_an_update_as_trl_sends_it(server: WebServer) -> None:
    await server.ok("/init_weight_transfer_engine", {"init_info": ADDRESS | {"packed": True}})
    (opened,) = server.actions
    assert isinstance(opened, OpenTransfer)
    assert opened.transfer == NcclTransfer(
        name="vllm", address="10.0.0.1", port=5000, rank_offset=1, world_size=3, packed=True, buffer_bytes=1 << 30
    )
    await server.ok("/start_weight_update", {"is_checkpoint_format": True})
    await server.ok("/update_weights", {"update_info": INFO})
    await server.ok("/update_weights", {"update_info": [INFO, INFO]})
    await server.ok("/finish_weight_update", {"weight_version": "step-1"})
    assert sent(server)[1:] == ["BeginUpdate", *["LoadTensors"] * 3, "VerifyUpdate", "CommitUpdate"]
    load = loads(server)[0]
    assert (load.names, load.dtypes, load.shapes) == (("a", "b"), ("bfloat16", "float32"), ((2, 3), (4,)))
    assert load.source == Broadcast(transfer="vllm")
    assert await server.get("/weight_info") == (200, {"weight_version": "step-1"})
    await server.ok("/shutdown_weight_transfer_engine", {})
    assert sent(server)[-1] == "CloseTransfer"


async def test_without_a_version_it_stays(server: WebServer) -> None:
    await server.ok("/start_weight_update", {})
    async with server.http.post(server.url + "/finish_weight_update") as response:
        assert response.status == 200
    assert await server.get("/weight_info") == (200, {"weight_version": "default"})
    assert (await server.ok("/update_weight_version", {"new_version": "v2"}))["new_version"] == "v2"
    assert await server.get("/weight_info") == (200, {"weight_version": "v2"})


async def test_other_ways_to_join(server: WebServer) -> None:
    given = {"rank_offset": 1, "world_size": 3}
    unique_id = bytes(range(128))
    await server.ok(
        "/init_weight_transfer_engine", {"init_info": given | {"nccl_unique_id_b64": b64encode(unique_id).decode()}}
    )
    await server.ok("/init_weight_transfer_engine", {"init_info": ADDRESS | {"backend": "gloo", "timeout": 20}})
    first, second = (action.transfer for action in server.actions)
    assert [action.seconds for action in server.actions] == [270, 18]
    assert (first.unique_id, first.address) == (unique_id, "")
    assert second == GroupTransfer(
        name="vllm", address="10.0.0.1", port=5000, rank_offset=1, world_size=3, backend="gloo"
    )


async def test_tensors_in_memory_that_is_shared(server: WebServer) -> None:
    await server.ok("/start_weight_update", {})
    await server.ok("/update_weights", {"update_info": INFO | {"shm": {"name": "bucket", "offsets": [0, 16]}}})
    await server.ok("/update_weights", {"update_info": INFO | {"cuda": {"handles": [GPU], "offsets": [0, 16]}}})
    await server.ok("/update_weights", {"update_info": INFO | {"packed": True}})
    shm, cuda, packed = (load.source for load in loads(server))
    assert shm == ShmBucket(name="bucket", offsets=(0, 16))
    assert isinstance(cuda, CudaBucket)
    assert [(each.gpu, each.handle, each.counter) for each in cuda.handles] == [("GPU-1", b"h", b"c")]
    assert packed == Broadcast(transfer="vllm", buffer_bytes=1 << 30)


async def test_a_folder_is_a_whole_update(server: WebServer) -> None:
    assert (await server.ok("/update_weights", {"weight_dir": "/models/step-5"}))["status"] == "ok"
    assert sent(server) == ["BeginUpdate", "LoadTensors", "VerifyUpdate", "CommitUpdate"]
    assert loads(server)[0].source == Directory(path="/models/step-5")


async def test_skyrls_methods(server: WebServer) -> None:
    for method, kwargs in (
        ("skyrl_start_weight_update", {"is_checkpoint_format": True}),
        ("update_weights_nccl", {"update_info": INFO | {"packed": True}}),
        ("skyrl_finish_weight_update", {}),
    ):
        assert await server.ok("/collective_rpc", {"method": method, "kwargs": kwargs}) == {"results": [None]}
    assert sent(server) == ["BeginUpdate", "LoadTensors", "VerifyUpdate", "CommitUpdate"]
    assert (await server.error("/collective_rpc", {"method": "exec"}))["param"] == "method"
    assert (await server.error("/collective_rpc", {"method": "update_weights_nccl", "kwargs": {"x": 1}}))[
        "param"
    ] == "x"


async def test_a_call_that_takes_too_long() -> None:
    async with web_server(admin=True) as server:
        server.scheduler.held = True
        asked = {"method": "skyrl_start_weight_update", "timeout": 0.01}
        assert (await server.error("/collective_rpc", asked, 504))["code"] == "timeout"


async def test_sums(server: WebServer) -> None:
    sums = (await server.ok("/weight_checker", {"action": "checksum"}))["checksums"]
    assert sums
    assert await server.ok("/weight_checker", {"action": "compare", "baseline": sums}) == {
        "match": True,
        "mismatches": [],
    }
    wrong = dict.fromkeys(sums, "0") | {"more": "1"}
    answer = await server.ok("/weight_checker", {"action": "compare", "baseline": wrong})
    assert answer == {"match": False, "mismatches": sorted(wrong)}
    assert (await server.error("/weight_checker", {"action": "compare"}))["param"] == "baseline"
    assert (await server.error("/weight_checker", {"action": "reset"}))["param"] == "action"


async def test_what_fails_is_said_and_the_engine_stays_paused(server: WebServer) -> None:
    assert "no update" in (await server.error("/update_weights", {"update_info": INFO}, 409))["message"]
    await server.ok("/start_weight_update", {})
    server.scheduler.control_error = "a: the shape is wrong"
    error = await server.error("/update_weights", {"update_info": INFO}, 409)
    assert (error["code"], error["message"]) == ("control_failed", "a: the shape is wrong")
    assert await server.get("/is_paused") == (200, {"is_paused": True})
    assert await server.get("/weight_info") == (200, {"weight_version": "default"})


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/init_weight_transfer_engine", {}, "init_info"),
        ("/init_weight_transfer_engine", {"init_info": {"rank_offset": 1, "world_size": 2}}, "init_info"),
        ("/init_weight_transfer_engine", {"init_info": ADDRESS | {"nccl_unique_id_b64": "AA=="}}, "init_info"),
        (
            "/init_weight_transfer_engine",
            {"init_info": {"rank_offset": 1, "world_size": 2, "nccl_unique_id_b64": "AA=="}},
            "init_info.nccl_unique_id_b64",
        ),
        (
            "/init_weight_transfer_engine",
            {"init_info": ADDRESS | {"backend": "gloo", "packed": True}},
            "init_info.backend",
        ),
        ("/init_weight_transfer_engine", {"init_info": ADDRESS | {"x": 1}}, "init_info.x"),
        (
            "/init_weight_transfer_engine",
            {"init_info": ADDRESS | {"packed_num_buffers": 9}},
            "init_info.packed_num_buffers",
        ),
        ("/start_weight_update", {"is_checkpoint_format": False}, "is_checkpoint_format"),
        ("/update_weights", {}, "update_info"),
        ("/update_weights", {"update_info": INFO, "weight_dir": "/x"}, "update_info"),
        ("/update_weights", {"update_info": INFO | {"ipc_handles_pickled": "AA=="}}, "update_info.ipc_handles_pickled"),
        (
            "/update_weights",
            {"update_info": INFO | {"shm": {"name": "a", "offsets": [0]}, "cuda": {"handles": [GPU], "offsets": []}}},
            "update_info.shm",
        ),
        (
            "/update_weights",
            {"update_info": INFO | {"cuda": {"handles": [GPU | {"handle": "?"}], "offsets": []}}},
            "update_info.cuda.handles",
        ),
        ("/update_weight_version", {}, "new_version"),
    ],
)
async def test_what_cannot_be_meant_is_refused(server: WebServer, path: str, body: Any, param: str) -> None:
    assert (await server.error(path, body))["param"] == param
    assert not server.actions
