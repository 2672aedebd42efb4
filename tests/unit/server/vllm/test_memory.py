from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.drivers.web_server import WebServer, web_server


@pytest.fixture
async def server() -> AsyncIterator[WebServer]:
    async with web_server(admin=True) as running:
        yield running


async def state(server: WebServer) -> tuple[bool, bool]:
    """Whether it sleeps, and whether it is paused."""
    return (await server.get("/is_sleeping"))[1]["is_sleeping"], (await server.get("/is_paused"))[1]["is_paused"]


async def test_sleep_and_wake(server: WebServer) -> None:
    assert await server.ok("/sleep?level=1&mode=keep", {}) == {"status": "sleeping", "level": 1}
    assert await state(server) == (True, True)
    assert await server.ok("/wake_up?tags=weights", {}) == {"status": "sleeping", "tags": ["weights"]}
    assert await state(server) == (True, True)
    answer = await server.ok("/wake_up?tags=weights&tags=kv_cache", {})
    assert answer == {"status": "awake", "tags": ["weights", "kv_cache"]}
    assert await state(server) == (False, False)
    assert server.scheduler.acts == ["Pause", "Sleep", "Wake", "Resume"]


async def test_level_zero_is_a_pause(server: WebServer) -> None:
    await server.ok("/sleep?level=0", {})
    assert await state(server) == (False, True)
    assert await server.ok("/wake_up?tags=scheduling", {}) == {"status": "awake", "tags": ["scheduling"]}
    assert await state(server) == (False, False)


async def test_weights_may_come_while_the_cache_sleeps(server: WebServer) -> None:
    await server.ok("/sleep", {})
    await server.ok("/wake_up?tags=weights", {})
    await server.ok("/start_weight_update", {})
    await server.ok("/finish_weight_update", {})
    assert await server.ok("/wake_up", {}) == {"status": "awake", "tags": None}


async def test_the_memory_alone(server: WebServer) -> None:
    await server.ok("/pause?mode=keep", {})
    assert await server.ok("/release_kv_cache_memory", {}) == {"status": "kv_cache_released"}
    assert await state(server) == (True, True)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/sleep?level=3", {}, "level"),
        ("/sleep?mode=now", {}, "mode"),
        ("/sleep?tags=x", {}, "tags"),
        ("/sleep", {"level": 1}, "level"),
        ("/wake_up?tags=all", {}, "tags"),
    ],
)
async def test_what_cannot_be_meant_is_refused(server: WebServer, path: str, body: Any, param: str) -> None:
    assert (await server.error(path, body))["param"] == param
    assert server.scheduler.acts == []


async def test_weights_do_not_sleep(server: WebServer) -> None:
    error = await server.error("/sleep?level=2", {}, 409)
    assert "weights stay on the device" in error["message"]
