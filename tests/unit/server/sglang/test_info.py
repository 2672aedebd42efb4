from __future__ import annotations

from tests.drivers.web_server import NAME, WebServer


async def test_the_model(server: WebServer) -> None:
    status, info = await server.get("/model_info")
    assert status == 200
    assert (info["model_path"], info["weight_version"], info["is_generation"]) == (NAME, "default", True)
    assert await server.get("/get_model_info") == (200, info)


async def test_the_version_of_the_weights_has_a_route_of_its_own(server: WebServer) -> None:
    assert await server.get("/get_weight_version") == (200, {"weight_version": "default"})


async def test_loads_count_what_runs_and_waits(server: WebServer) -> None:
    status, info = await server.get("/v1/loads?include=core")
    assert status == 200
    zero = {"dp_rank": 0, "num_running_reqs": 0, "num_waiting_reqs": 0, "num_total_reqs": 0}
    assert (info["dp_rank_count"], info["loads"]) == (1, [zero])
    assert (await server.get("/v1/loads?include=memory"))[0] == 400


async def test_health(server: WebServer) -> None:
    assert await server.get("/health_generate") == (200, {"status": "ok"})
