from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.drivers.until import until
from tests.drivers.web_server import WebServer, web_server
from toka_async.control import Pause, ResetPrefixCache

PROMPT = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 400}, "return_logprob": True}


@pytest.fixture
async def server() -> AsyncIterator[WebServer]:
    async with web_server(admin=True) as running:
        yield running


@pytest.mark.parametrize(
    ("body", "mode"), [({}, "abort"), ({"mode": "retract"}, "retract"), ({"mode": "in_place"}, "keep")]
)
async def test_pause_and_continue(server: WebServer, body: Any, mode: Any) -> None:
    assert (await server.ok("/pause_generation", body))["status"] == "ok"
    assert server.actions == [Pause(mode=mode)]
    assert await server.get("/is_paused") == (200, {"is_paused": True})
    assert (await server.ok("/continue_generation", {"torch_empty_cache": True}))["status"] == "ok"
    assert await server.get("/is_paused") == (200, {"is_paused": False})


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_the_cache_is_flushed(server: WebServer, method: str) -> None:
    async with server.http.request(method, server.url + "/flush_cache?timeout=5") as response:
        assert (response.status, response.content_type) == (200, "text/plain")
    assert server.actions == [ResetPrefixCache()]


async def test_aborts(server: WebServer) -> None:
    await server.ok("/pause_generation", {"mode": "in_place"})
    many = PROMPT | {"input_ids": [[5], [6]], "rid": ["a", "b"], "logprob_start_len": 0}
    first, second = (asyncio.create_task(server.ok("/generate", each)) for each in (many, PROMPT | {"rid": "c"}))
    await until(lambda: len(server.scheduler.submits) == 3)
    assert (await server.ok("/abort_request", {"rid": "a"}))["message"] == "1 requests are aborted"
    assert len(server.scheduler.requests) == 2
    assert (await server.ok("/abort_request", {"abort_all": True}))["message"] == "2 requests are aborted"
    for sample in [*await first, await second]:
        meta = sample["meta_info"]
        assert meta["finish_reason"] == {"type": "abort", "message": "Abort before prefill"}
        assert meta["output_token_logprobs"] == meta["input_token_logprobs"] == sample["output_ids"] == []


async def test_an_id_of_many_prompts_means_all_of_them(server: WebServer) -> None:
    await server.ok("/pause_generation", {"mode": "in_place"})
    samplings = [{"max_new_tokens": 400}, {"max_new_tokens": 300}]
    asked = asyncio.create_task(
        server.ok("/generate", {"input_ids": [[5], [6]], "sampling_params": samplings, "rid": "r"})
    )
    await until(lambda: len(server.scheduler.submits) == 2)
    assert (await server.ok("/abort_request", {"rid": "r_1"}))["message"] == "1 requests are aborted"
    assert (await server.ok("/abort_request", {"rid": "r"}))["message"] == "1 requests are aborted"
    assert [sample["meta_info"]["finish_reason"]["type"] for sample in await asked] == ["abort", "abort"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/pause_generation", {"mode": "keep"}, "mode"),
        ("/abort_request", {}, "rid"),
        ("/abort_request", {"rid": "a", "abort_all": True}, "rid"),
        ("/continue_generation", {"torch_empty_cache": 5}, "torch_empty_cache"),
        ("/flush_cache?timeout=-1", {}, "timeout"),
        ("/flush_cache?timeout=", {}, "timeout"),
    ],
)
async def test_what_cannot_be_meant_is_refused(server: WebServer, path: str, body: Any, param: str) -> None:
    assert (await server.error(path, body))["param"] == param
    assert not server.actions
