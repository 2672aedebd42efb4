from __future__ import annotations

from tests.drivers.web_server import NAME, WebServer


async def test_the_model(server: WebServer) -> None:
    status, info = await server.get("/model_info")
    assert status == 200
    assert (info["model_path"], info["weight_version"], info["is_generation"]) == (NAME, "default", True)
    assert await server.get("/get_model_info") == (200, info)


async def test_health(server: WebServer) -> None:
    assert await server.get("/health_generate") == (200, {"status": "ok"})
