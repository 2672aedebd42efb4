from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.drivers.until import until
from tests.drivers.web_server import WebServer, web_server
from tests.fakes.scheduler import FakeScheduler
from toka_async.control import Pause, ResetPrefixCache, Resume
from toka_async.server.generate.grammar_checks import GrammarChecks

TOKENS = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 400, "logprobs": 0}}


@pytest.fixture
async def server() -> AsyncIterator[WebServer]:
    async with web_server(admin=True) as running:
        yield running


async def test_pause_and_resume(server: WebServer) -> None:
    assert await server.ok("/pause?mode=keep&clear_cache=false", {}) == {"status": "paused"}
    assert await server.get("/is_paused") == (200, {"is_paused": True})
    asked = asyncio.create_task(server.ok("/inference/v1/generate", TOKENS))
    await until(lambda: server.scheduler.submits)
    async with server.http.post(server.url + "/resume") as response:  # without a body
        assert await response.json() == {"status": "resumed"}
    assert (await asked)["choices"][0]["finish_reason"] == "length"
    assert await server.get("/is_paused") == (200, {"is_paused": False})


@pytest.mark.parametrize(("query", "resets"), [("", 1), ("?mode=wait", 1), ("?clear_cache=0", 0), ("?mode=keep", 0)])
async def test_a_pause_clears_the_cache_unless_told_otherwise(server: WebServer, query: str, resets: int) -> None:
    await server.ok(f"/pause{query}", {})
    assert sum(isinstance(action, ResetPrefixCache) for action in server.actions) == resets


async def test_aborted_requests_have_the_tokens_so_far() -> None:
    async with web_server(FakeScheduler(held=True), admin=True) as server:
        mine = asyncio.create_task(server.ok("/inference/v1/generate", TOKENS | {"request_id": "mine"}))
        other = asyncio.create_task(server.ok("/inference/v1/generate", TOKENS))
        while len(server.scheduler.submits) < 2:
            await asyncio.sleep(0)
            server.scheduler.step()
        aborted = asyncio.create_task(server.ok("/abort_requests", {"request_ids": ["mine", "unknown"]}))
        while not mine.done():
            await asyncio.sleep(0)
            server.scheduler.step()
        (choice,) = (await mine)["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("abort", None)
        assert 0 < len(choice["token_ids"]) < 400
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
        assert await aborted == {"status": "aborted", "aborted": 1}
        server.scheduler.held = False
        assert (await server.ok("/abort_requests", {}))["aborted"] == 1
        assert (await other)["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/inference/v1/generate", TOKENS | {"request_id": "mine"}),
        ("/generate", {"input_ids": [5, 6], "rid": "mine"}),
        ("/v1/completions", {"prompt": [5, 6], "request_id": "mine"}),
    ],
)
async def test_a_request_is_aborted_by_name_while_its_grammar_is_checked(
    server: WebServer, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    checked = asyncio.Event()

    async def wait(*_: object) -> None:
        await checked.wait()

    monkeypatch.setattr(GrammarChecks, "check", wait)
    await server.ok("/pause?mode=keep", {})
    asked = asyncio.create_task(server.ok(path, body))
    await until(lambda: server.scheduler.submits)
    assert await server.ok("/abort_requests", {"request_ids": ["mine"]}) == {"status": "aborted", "aborted": 1}
    checked.set()
    assert "abort" in str(await asked)


async def test_a_request_that_has_not_begun_is_aborted_without_tokens(server: WebServer) -> None:
    await server.ok("/pause?mode=keep", {})
    asked = TOKENS | {"sampling_params": {"logprobs": 0, "prompt_logprobs": 0}}
    waiting = asyncio.create_task(server.ok("/inference/v1/generate", asked))
    await until(lambda: server.scheduler.submits)
    await server.ok("/abort_requests", {})
    answer = await waiting
    assert answer["prompt_logprobs"] is None
    assert answer["choices"][0] | {"logprobs": None} == {
        "index": 0,
        "finish_reason": "abort",
        "stop_reason": None,
        "token_ids": [],
        "logprobs": None,
        "weight_versions": [],
    }
    assert answer["choices"][0]["logprobs"] == {"content": []}


async def test_the_cache(server: WebServer) -> None:
    assert await server.ok("/reset_prefix_cache", {"reset_running_requests": False}) == {"success": True}
    assert server.actions == [ResetPrefixCache()]
    await server.ok("/reset_prefix_cache?reset_running_requests=true&reset_external=true", {})
    assert server.actions[1:] == [Pause(mode="retract"), ResetPrefixCache(), Resume()]
    await server.ok("/pause?mode=keep", {})
    await server.ok("/reset_prefix_cache", {"reset_running_requests": True})
    assert await server.get("/is_paused") == (200, {"is_paused": True})


async def test_a_reset_that_fails_leaves_no_pause(server: WebServer) -> None:
    server.scheduler.control_error, server.scheduler.failing_act = "no luck", "ResetPrefixCache"
    status, _ = await server.post("/reset_prefix_cache?reset_running_requests=true", {})
    assert status == 409
    assert await server.get("/is_paused") == (200, {"is_paused": False})
    assert server.scheduler.paused is None


async def test_what_fails_is_said(server: WebServer) -> None:
    server.scheduler.control_error = "rank 0 is out of luck"
    error = await server.error("/pause?mode=keep", {}, 409)
    assert (error["code"], error["message"]) == ("control_failed", "rank 0 is out of luck")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/pause?mode=now", {}, "mode"),
        ("/pause?level=1", {}, "level"),
        ("/pause", {"mode": "keep"}, "mode"),
        ("/resume", {"x": 1}, "x"),
        ("/abort_requests", {"request_ids": [5]}, "request_ids[0]"),
        ("/abort_requests", [], None),
        ("/reset_prefix_cache?reset_external=perhaps", {}, "reset_external"),
    ],
)
async def test_what_cannot_be_meant_is_refused(server: WebServer, path: str, body: Any, param: str | None) -> None:
    assert (await server.error(path, body))["param"] == param
    assert not server.actions


async def test_the_routes_are_closed_unless_opened() -> None:
    async with web_server() as server:
        error = await server.error("/pause", {}, 404)
        assert error["code"] == "admin_closed"
        assert "server.admin=true" in error["message"]
