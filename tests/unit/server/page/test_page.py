from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from tests.drivers.until import until
from tests.drivers.web_server import WebServer, checked_error, web_server
from tests.fakes.scheduler import READY, FakeScheduler
from tests.processes.keyed import ALICE, KEYS, bearer
from toka_async.messages import Forecast, RankDevice, Stats
from toka_async.server.page.page import FOLDER, STATE

RANK = RankDevice(rank=0, device="H", dtype="bfloat16", weights=10, cache=20, used=40, free=50, total=100)
FILES = sorted(path.name for path in FOLDER.iterdir())
REFERENCE = re.compile(r'(?:src|href|from|import)[ =]+"([^"]+)"')


@pytest.fixture
async def server() -> AsyncIterator[WebServer]:
    async with web_server(FakeScheduler(ready=msgspec.structs.replace(READY, ranks=(RANK,)))) as running:
        yield running


async def answer(server: WebServer, path: str, **headers: str) -> tuple[int, Any, str]:
    """Status, headers and text."""
    async with server.http.get(server.url + path, headers=headers) as response:
        return response.status, response.headers, await response.text()


def path_of(name: str) -> str:
    return "/" if name == "index.html" else f"/page/{name}"


async def test_files_and_their_headers(server: WebServer) -> None:
    types = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
    for name in FILES:
        status, headers, text = await answer(server, path_of(name))
        assert (status, text) == (200, (FOLDER / name).read_text())
        assert headers["Content-Type"] == f"{types[name.rpartition('.')[2]]}; charset=utf-8"
        policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
        assert policy == {
            "default-src": "'none'",
            "script-src": "'self'",
            "style-src": "'self'",
            "connect-src": "'self'",
            "img-src": "'self' data:",
            "base-uri": "'none'",
            "form-action": "'none'",
            "frame-ancestors": "'none'",
        }
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
    for path in ("/page/", "/page/none.js", "/page/..%2Fpage.py", "/page/%2e%2e/config.py"):
        status, headers, _ = await answer(server, path)
        assert status == 404
        assert "script-src" not in headers["Content-Security-Policy"]


async def test_files_are_asked_for_again_only_when_they_changed(server: WebServer) -> None:
    _, headers, text = await answer(server, "/")
    assert headers["Cache-Control"] == "no-cache"
    etag = headers["ETag"]
    for known in (etag, f'"other", {etag}', f"W/{etag}", "*"):
        status, headers, text = await answer(server, "/", **{"If-None-Match": known})
        assert (status, text, headers["ETag"]) == (304, "", etag)
    assert (await answer(server, "/", **{"If-None-Match": '"other"'}))[0] == 200
    assert (await answer(server, "/page/style.css", **{"If-None-Match": etag}))[0] == 200


def test_nothing_comes_from_elsewhere() -> None:
    """Every address in the files is one of them; what a policy forbids is not in them."""
    for name in FILES:
        text = (FOLDER / name).read_text()
        for address in REFERENCE.findall(text):
            assert address.removeprefix("./").removeprefix("/page/") in FILES, (name, address)
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            name
        )
        if name.endswith(".html"):
            assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*src=)", text)


async def test_it_can_be_left_out() -> None:
    async with web_server(page=False) as server:
        for path in ("/", STATE, "/page/main.js"):
            status, refused = await server.get(path)
            assert (status, checked_error(refused)["message"].partition(":")[0]) == (404, "no such route")
        _, document = await server.get("/openapi.json")
        assert not [path for path in document["paths"] if path == "/" or path.startswith("/page")]


async def test_with_keys_only_the_files_are_open() -> None:
    async with web_server(keys=KEYS) as server:
        for name in FILES:
            assert (await answer(server, path_of(name)))[0] == 200
        assert (await answer(server, STATE))[0] == 401
        assert (await answer(server, STATE, **bearer("sk-wrong-012345")))[0] == 401
        assert (await answer(server, STATE, **bearer(ALICE)))[0] == 200


FORECAST = Forecast(steps=1, pages=(2, 0), limit=250)


async def test_state(server: WebServer) -> None:
    status, state = await server.get(STATE)
    assert status == 200
    assert (state["problem"], state["has_batches"], state["max_n"]) == (None, False, 16384)
    assert state["model"] == {
        "name": "org/tiny",
        "has_chat": True,
        "temperature": 1.0,
        "max_context": 512,
        "vocab_size": 400,
        "page_size": 16,
    }
    (replica,) = state["replicas"]
    assert (replica["problem"], replica["restarts"], replica["num_pages"], replica["max_seqs"]) == (None, 0, 256, 64)
    (device,) = replica["devices"]
    assert device == msgspec.to_builtins(msgspec.structs.asdict(RANK))
    server.engine.memory["rank-0-0"] = (30, 45, 100)  # as the rank's GPU is now
    (device,) = (await server.get(STATE))[1]["replicas"][0]["devices"]
    assert (device["used"], device["free"]) == (45, 45)
    server.engine.begin_drain()
    assert "shutting down" in (await server.get(STATE))[1]["problem"]


async def test_before_the_engine_is_ready() -> None:
    async with web_server(FakeScheduler(ready=None)) as server:
        status, state = await server.get(STATE)
        assert (status, state["model"]["max_context"], state["replicas"][0]["devices"]) == (200, 0, [])
        assert "starting" in state["problem"]
        assert state["load"]["replicas"][0]["state"] == "starting"


async def test_history_and_forecasts() -> None:
    """Replicas are asked for forecasts while they have something to do, and somebody looks."""
    scheduler = FakeScheduler(held=True)
    scheduler.silent = True
    async with web_server(scheduler) as server:
        await server.get(STATE)
        assert not server.scheduler.asked
        asking = asyncio.create_task(server.ok("/v1/completions", {"prompt": [5, 6, 7], "n": 2, "max_tokens": 2}))
        await until(lambda: server.engine.busy)
        looking = asyncio.create_task(server.get(STATE))
        await until(lambda: server.scheduler.asked == 1)
        said = Stats(num_running=2, num_pages=256, num_steps=1, pages_used=2, forecast=FORECAST, answers=1)
        server.engine.on_messages([said])
        _, state = await looking
        (cache,) = state["history"]["caches"]
        (forecast,) = cache["forecasts"]
        assert (forecast["step"], forecast["pages"], forecast["limit"]) == (1, [2, 0], 250)
        newest = state["history"]["at"][-1]
        _, later = await server.get(f"{STATE}?after={max(newest, forecast['at'], 1)}")
        assert (later["history"]["at"], later["history"]["caches"][0]["forecasts"]) == ([], [])
        for _ in range(2):
            server.scheduler.step()
        await asking


async def test_bad_questions(server: WebServer) -> None:
    for query, param in (("after=x", "after"), ("after=0", "after"), ("after=-1", "after"), ("other=1", "other")):
        status, refused = await server.get(f"{STATE}?{query}")
        assert (status, checked_error(refused)["param"]) == (400, param)
