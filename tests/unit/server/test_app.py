from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import aiohttp
import pytest

from tests.drivers.until import turns, until
from tests.drivers.web_server import JSON, JSON_HEAD, WebServer, checked_error, web_server
from tests.fakes.scheduler import FakeScheduler
from toka_async.openai.parse import find_objects
from toka_async.server.engine.request_group import RequestGroup
from toka_async.server.http.respond import SERVICE

PATH = "/v1/completions"
LONG = {"prompt": ["x", "y"], "n": 2, "max_tokens": 400, "seed": 1}  # whose first tokens are whole characters


def held() -> FakeScheduler:
    """Generates nothing until it is told to step."""
    return FakeScheduler(held=True)


async def leave(server: WebServer, body: dict[str, Any], num_events: int = 0) -> None:
    """Sends a request, perhaps reads some of the answer, and closes the connection."""
    async with aiohttp.ClientSession() as http:
        task = asyncio.create_task(http.post(server.url + PATH, json=body))
        await until(lambda: server.engine.num_requests > 0)
        server.scheduler.step()
        if num_events:
            response = await task
            for _ in range(num_events):
                await response.content.readuntil(b"\n\n")
            response.close()
        else:
            task.cancel()
            await asyncio.wait([task])


async def test_no_first_request_waits_until_its_fields_are_examined() -> None:
    find_objects.cache_clear()
    async with web_server() as server:
        num_examined = find_objects.cache_info().misses
        await server.ok(PATH, {"prompt": "x"})
        await server.ok("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
        await server.ok("/tokenize", {"prompt": "x"})
        assert find_objects.cache_info().misses == num_examined > 0


@pytest.mark.parametrize(("stream", "num_events"), [(False, 0), (True, 0), (True, 2)])
async def test_a_client_that_leaves_cancels(stream: bool, num_events: int) -> None:
    async with web_server(held()) as server:
        await leave(server, {**LONG, "stream": stream}, num_events)
        await until(lambda: not server.engine.busy)
        server.scheduler.step()
        submitted = [submit.request_id for submit in server.scheduler.submits]
        assert server.scheduler.cancelled == submitted
        assert len(submitted) == 2
        assert not server.scheduler.requests


async def test_a_client_that_leaves_before_its_stop_set_is_known() -> None:
    async with web_server(held()) as server:
        sets = server.app[SERVICE]._stop_sets
        async with aiohttp.ClientSession() as http:
            body = json.dumps({"prompt": "x", "stop": "a"})
            task = asyncio.create_task(http.post(server.url + PATH, data=body, headers=JSON))
            await until(lambda: bool(sets._sets))
            task.cancel()
            await asyncio.wait([task])
        await until(lambda: all(not each.num_users for each in sets._sets.values()))
        assert not server.engine.busy


async def test_late_messages_of_a_cancelled_request_are_ignored() -> None:
    async with web_server(held()) as server:
        await leave(server, {**LONG, "stream": True}, 1)
        for _ in range(3):
            server.scheduler.step()
        assert await server.get("/health") == (200, {"status": "ok"})


@pytest.mark.parametrize("stream", [False, True])
async def test_the_engine_stops_before_the_first_token(stream: bool) -> None:
    async with web_server(held()) as server:
        task = asyncio.create_task(server.post(PATH, {**LONG, "stream": stream}))
        await until(lambda: server.engine.num_requests == 2)
        server.engine.fail_all("rank 0 died")
        status, answer = await task
        error = checked_error(answer)
        assert (status, error["type"], error["code"]) == (500, "server_error", "engine_stopped")
        assert "rank 0 died" in error["message"]
        await until(lambda: not server.engine.busy)
        status, answer = await server.post(PATH, LONG)
        assert status == 503
        assert "rank 0 died" in checked_error(answer)["message"]
        assert (await server.get("/health"))[0] == 503


async def test_the_engine_stops_in_a_stream() -> None:
    async with web_server(held()) as server:
        task = asyncio.create_task(server.events(PATH, {**LONG, "return_token_ids": True}))
        await until(lambda: server.engine.num_requests == 2)
        server.scheduler.step()
        await turns(10)
        server.engine.fail_all("rank 0 died")
        *chunks, last = await task
        assert len(chunks) == 4
        assert "rank 0 died" in checked_error(last)["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_the_engine_refuses(stream: bool) -> None:
    scheduler = FakeScheduler()
    scheduler.fail_with = "too long for the cache"
    async with web_server(scheduler) as server:
        error = await server.error(PATH, {"prompt": "x", "stream": stream})
        assert (error["message"], error["code"]) == ("too long for the cache", "request_failed")
        assert not server.engine.busy


async def test_too_many_requests() -> None:
    async with web_server(held(), max_requests=2) as server:
        first = asyncio.create_task(server.post(PATH, {"prompt": ["x", "y"], "max_tokens": 1}))
        await until(lambda: server.engine.num_requests == 2)
        async with server.http.post(server.url + PATH, json={"prompt": "z"}) as response:
            assert response.status == 429
            assert response.headers["Retry-After"] == "1"
            assert checked_error(await response.json())["type"] == "rate_limit_error"
        server.scheduler.step()
        assert (await first)[0] == 200
        server.scheduler.held = False
        await server.ok(PATH, {"prompt": "z", "max_tokens": 1})


async def test_draining() -> None:
    async with web_server(held()) as server:
        running = asyncio.create_task(server.ok(PATH, {"prompt": "x", "max_tokens": 2}))
        await until(lambda: server.engine.num_requests == 1)
        server.engine.begin_drain()
        idle = asyncio.create_task(server.engine.wait_idle())
        status, answer = await server.post(PATH, {"prompt": "y"})
        assert status == 503
        assert "shutting down" in checked_error(answer)["message"]
        assert not idle.done()
        server.scheduler.step()
        server.scheduler.step()
        assert (await running)["usage"]["completion_tokens"] == 2
        await asyncio.wait_for(idle, 60)


async def test_nothing_of_an_unexpected_error_shows(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with web_server() as server:

        def broken(_data: bytes, _kind: type) -> None:
            raise ZeroDivisionError("the secret")

        monkeypatch.setattr("toka_async.server.http.receive.parse_request", broken)
        status, answer = await server.post(PATH, {"prompt": "x"})
        error = checked_error(answer)
        assert (status, error["type"]) == (500, "server_error")
        assert "secret" not in error["message"]
        assert "the secret" in caplog.text


async def test_a_slow_reader_costs_no_text() -> None:
    """What a client does not read stays tokens: it is not turned into text that waits in buffers."""
    async with web_server(held()) as server:
        host, port = server.url.removeprefix("http://").split(":")
        body = json.dumps(
            {"prompt": "x", "n": 32, "max_tokens": 40, "stream": True, "logprobs": 20, "seed": 1}
        ).encode()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((host, int(port)))
            client.sendall(JSON_HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            await until(lambda: server.engine.num_requests == 1)
            (transport,) = transports(server)
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            server.scheduler.step()
            found = server.engine.requests.find(server.scheduler.submits[0].request_id)
            assert found is not None
            for _ in range(39):
                server.scheduler.step()
                await turns()
            assert server.engine.num_requests == 0
            assert server.engine.busy  # the handler waits for the client
            assert isinstance(found[0], RequestGroup)
            assert ((await found[0].news(1 << 20)).counts > 20).all()
            assert 0 < transport.get_write_buffer_size() < 500_000  # of 1.4 MB
        await until(lambda: not server.engine.busy)


def transports(server: WebServer) -> list[asyncio.Transport]:
    runner_server = server.runner.server
    assert runner_server is not None
    return [each.transport for each in runner_server.connections if each.transport is not None]


async def test_what_came_meanwhile_is_one_chunk() -> None:
    async with web_server(held()) as server:
        task = asyncio.create_task(server.events(PATH, {"prompt": "x", "max_tokens": 6, "return_token_ids": True}))
        await until(lambda: server.engine.num_requests == 1)
        for _ in range(6):
            server.scheduler.step()
        (event,) = await task
        assert len(event["choices"][0]["token_ids"]) == 6
        assert event["choices"][0]["finish_reason"] == "length"


async def test_many_at_once() -> None:
    async with web_server() as server:
        bodies = [{"prompt": "x", "max_tokens": 3, "seed": seed} for seed in range(100)]
        answers = await asyncio.gather(*(server.ok(PATH, body) for body in bodies))
        assert all(answer["usage"]["completion_tokens"] == 3 for answer in answers)
        assert not server.engine.busy
