from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.drivers.web_server import WebServer, web_server
from toka_async.control import Broadcast, Directory, GroupTransfer, LoadTensors, ReadTensor
from toka_async.server.vllm.weights import MOST_OFFSET

GROUP = {"master_address": "[::1]", "master_port": "5000", "rank_offset": 1, "world_size": 2}
TENSORS = {"names": ["a"], "dtypes": ["bfloat16"], "shapes": [[2]], "group_name": "g"}


@pytest.fixture
async def server() -> AsyncIterator[WebServer]:
    async with web_server(admin=True) as running:
        yield running


def loads(server: WebServer) -> list[LoadTensors]:
    return [action for action in server.actions if isinstance(action, LoadTensors)]


async def version(server: WebServer) -> str:
    named: str = (await server.get("/model_info"))[1]["weight_version"]
    return named


async def test_groups(server: WebServer) -> None:
    assert (await server.ok("/init_weights_update_group", GROUP | {"backend": "gloo"}))["success"] is True
    assert server.actions[0].transfer == GroupTransfer(
        name="weight_update_group", address="::1", port=5000, rank_offset=1, world_size=2, backend="gloo"
    )
    await server.ok("/destroy_weights_update_group", {"group_name": "g"})
    assert server.actions[1].name == "g"
    await server.ok("/init_weights_update_group", GROUP | {"timeout": 0.5})
    assert server.actions[2].seconds == 0.45


async def test_parts_of_an_update_end_with_the_pause(server: WebServer) -> None:
    """As slime sends them."""
    await server.ok("/pause_generation", {})
    await server.get("/model_info")
    for name in ("v1", "v2"):
        await server.ok("/update_weights_from_distributed", TENSORS | {"flush_cache": False, "weight_version": name})
    assert await version(server) == "default"
    await server.ok("/continue_generation", {})
    assert server.scheduler.acts == [
        *("Pause", "BeginUpdate", "LoadTensors", "LoadTensors", "VerifyUpdate", "CommitUpdate", "Resume")
    ]
    assert [load.source for load in loads(server)] == [Broadcast(transfer="g")] * 2
    assert not server.actions[4].partial
    assert await version(server) == "v2"


async def test_without_a_pause_each_is_an_update(server: WebServer) -> None:
    body = TENSORS | {"abort_all_requests": True, "load_format": "flattened_bucket", "weight_version": "v1"}
    await server.ok("/update_weights_from_distributed", body)
    assert server.scheduler.acts == ["Abort", "BeginUpdate", "LoadTensors", "VerifyUpdate", "CommitUpdate"]
    assert loads(server)[0].source == Broadcast(transfer="g", buffer_bytes=MOST_OFFSET)
    assert server.actions[3].partial
    assert await version(server) == "v1"


async def test_begin_and_end(server: WebServer) -> None:
    await server.ok("/begin_weight_update", {"selector": "all"})
    await server.ok("/update_weights_from_distributed", TENSORS | {"weight_version": "v3"})
    await server.ok("/end_weight_update", {})
    assert server.scheduler.acts == ["BeginUpdate", "LoadTensors", "VerifyUpdate", "CommitUpdate"]
    assert await version(server) == "v3"


async def test_from_disk(server: WebServer) -> None:
    body = {"model_path": "/models/5", "weight_version": "5", "load_format": "auto", "keep_pause": True}
    answer = await server.ok("/update_weights_from_disk", body)
    assert answer == {"success": True, "message": "the weights are there", "num_paused_requests": 0}
    assert loads(server)[0].source == Directory(path="/models/5")
    assert await version(server) == "5"
    assert await server.get("/is_paused") == (200, {"is_paused": True})


async def test_what_fails_is_said_in_sglangs_form(server: WebServer) -> None:
    server.scheduler.control_error = "a: the shape is wrong"
    status, answer = await server.post("/update_weights_from_distributed", TENSORS)
    assert (status, answer["success"]) == (400, False)
    assert "a: the shape is wrong" in answer["message"]


async def test_the_version_alone(server: WebServer) -> None:
    answer = await server.ok("/update_weight_version", {"new_version": "v9", "abort_all_requests": True})
    assert (answer["success"], answer["new_version"]) == (True, "v9")
    assert server.scheduler.acts == ["Abort", "SetVersion"]


async def test_sums(server: WebServer) -> None:
    answer = await server.ok("/weights_checker", {"action": "checksum"})
    assert answer["success"] is True
    assert answer["ranks"][0]["checksums"]


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_tensor(server: WebServer, method: str) -> None:
    """With null for what is not finite."""
    for body, num_rows in (({"name": "w"}, 100), ({"name": "w", "truncate_size": 2}, 2)):
        async with server.http.request(method, server.url + "/get_weights_by_name", json=body) as response:
            assert (response.status, response.content_type) == (200, "application/json")
            assert await response.json() == [[5, 5], [None, None]]
        assert server.actions[-1] == ReadTensor(name="w", num_rows=num_rows)


async def test_a_tensor_that_cannot_be_read_is_named(server: WebServer) -> None:
    server.scheduler.control_error = "a: the model has no such tensor; did you mean b?"
    error = await server.error("/get_weights_by_name", {"name": "a"})
    assert error["message"] == "a: the model has no such tensor; did you mean b?"


@pytest.mark.parametrize("was_paused", [False, True])
async def test_the_memory(server: WebServer, was_paused: bool) -> None:
    if was_paused:
        await server.ok("/pause_generation", {"mode": "in_place"})
    for _ in range(2):
        await server.ok("/release_memory_occupation", {})
    assert (await server.get("/is_sleeping"))[1]["is_sleeping"]
    await server.ok("/resume_memory_occupation", {"tags": ["weights"]})
    assert (await server.get("/is_sleeping"))[1]["is_sleeping"]
    await server.ok("/resume_memory_occupation", {"tags": ["kv_cache"]})
    await server.ok("/resume_memory_occupation", {})
    assert not (await server.get("/is_sleeping"))[1]["is_sleeping"]
    assert (await server.get("/is_paused"))[1]["is_paused"] is was_paused


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/init_weights_update_group", GROUP | {"master_port": "99999"}, "master_port"),
        ("/init_weights_update_group", GROUP | {"pp_rank": 1}, "pp_rank"),
        ("/init_weights_update_group", GROUP | {"backend": "mpi"}, "backend"),
        ("/update_weights_from_distributed", TENSORS | {"load_format": "other"}, "load_format"),
        ("/update_weights_from_distributed", TENSORS | {"selector": "draft"}, "selector"),
        ("/update_weights_from_disk", {"model_path": "/x", "load_format": "dummy"}, "load_format"),
        ("/update_weights_from_disk", {"model_path": "/x", "is_async": True}, "is_async"),
        ("/release_memory_occupation", {"tags": ["weights"]}, "tags"),
        ("/weights_checker", {"action": "snapshot"}, "action"),
        ("/get_weights_by_name", {}, "name"),
        ("/get_weights_by_name", {"name": "w", "truncate_size": 0}, "truncate_size"),
        ("/get_weights_by_name", {"name": "w", "truncate_size": -1}, "truncate_size"),
        ("/get_weights_by_name", {"name": "w", "truncate_size": 1.5}, "truncate_size"),
        ("/get_weights_by_name", {"name": "w", "truncate_size": True}, "truncate_size"),
        ("/get_weights_by_name", {"name": "w", "truncate_size": 2**40}, "truncate_size"),
    ],
)
async def test_what_cannot_be_meant_is_refused(server: WebServer, path: str, body: Any, param: str) -> None:
    assert (await server.error(path, body))["param"] == param
    assert not server.actions
