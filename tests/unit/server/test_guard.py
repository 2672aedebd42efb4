"""A server that others can reach: keys, limits of each, deadlines, headers, and what a request must never touch."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from openai.types import Batch, BatchRequestCounts

from tests.fake_scheduler import FakeScheduler
from tests.web_server import WebServer, checked_error, web_server
from toka_async.config import ServerConfig
from toka_async.messages import Cancel
from toka_async.server.files import BATCHES
from toka_async.server.guard import GUARD
from toka_async.server.keys import Key, Keys, KeySource, digest_of
from toka_async.server.respond import SERVICE

ALICE, BOB = "sk-alice-0123456", "sk-bob-01234567"
KEYS = Keys((Key(digest_of(ALICE), "alice", 2, 40), Key(digest_of(BOB), "bob")))
ROUTES = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/org/tiny"),
    ("GET", "/v1/files"),
    ("GET", "/v1/batches"),
    ("GET", "/metrics"),
    ("GET", "/version"),
    ("GET", "/nowhere"),
    ("GET", "/health/x"),
    ("PUT", "/v1/models"),
    ("OPTIONS", "/v1/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/chat/completions/batch"),
    ("POST", "/v1/files"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def ask(server: WebServer, key: str, **fields: Any) -> tuple[int, Any, str | None]:
    """Status, body and Retry-After of a completion of 3 prompt tokens."""
    body = {"prompt": [1, 2, 3], "max_tokens": 10} | fields
    async with server.http.post(server.url + "/v1/completions", json=body, headers=bearer(key)) as response:
        return response.status, await response.json(), response.headers.get("Retry-After")


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[WebServer]:
    async with web_server(keys=KEYS, data_dir=str(tmp_path)) as running:
        yield running


# ---- keys


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_every_route_needs_a_key(server: WebServer, method: str, path: str) -> None:
    wrong: tuple[dict[str, str], ...] = (
        {},
        bearer("sk-wrong-01234"),
        {"Authorization": ALICE},
        {"Authorization": f"Basic {ALICE}"},
        bearer(""),
    )
    for headers in wrong:
        async with server.http.request(method, server.url + path, headers=headers) as response:
            assert response.status == 401
            assert response.headers["WWW-Authenticate"] == "Bearer"
            error = checked_error(await response.json())
            assert error["code"] == "invalid_api_key"
            assert "sk-" not in error["message"]
    for key in (ALICE, BOB):
        async with server.http.request(method, server.url + path, headers=bearer(key)) as response:
            assert response.status != 401
    assert server.app[GUARD].num_unauthorized == len(wrong)


async def test_keys_come_and_go_while_it_serves(tmp_path: Path) -> None:
    path, now = tmp_path / "keys", [0.0]
    path.write_text(f"{ALICE} alice max_requests=1\n")
    source = KeySource(ServerConfig(api_keys=str(path)), {}, lambda: now[0])
    async with web_server(keys=source) as server:
        assert [(await ask(server, key))[0] for key in (ALICE, BOB)] == [200, 401]
        path.write_text(f"{BOB} bob\n{ALICE} alice max_requests=9\n")
        now[0] += 1
        assert [(await ask(server, key))[0] for key in (ALICE, BOB)] == [200, 200]
        assert server.app[SERVICE].accounts.by_name["key alice"].max_requests == 9
        path.write_text(f"{BOB} bob\n")
        now[0] += 1
        assert [(await ask(server, key))[0] for key in (ALICE, BOB)] == [401, 200]


async def test_health_is_open(server: WebServer) -> None:
    for path in ("/health", "/ping", "/%68ealth"):
        assert await server.get(path) == (200, {"status": "ok"})


async def test_metrics_can_be_open() -> None:
    async with (
        web_server(keys=KEYS, open_metrics=True) as server,
        server.http.get(server.url + "/metrics") as response,
    ):
        assert response.status == 200
        text = await response.text()
    assert 'toka:held_requests{owner="this server"} 0.0' in text
    assert "toka:unauthorized_requests_total 0.0" in text


async def test_without_keys_everybody_may_ask() -> None:
    async with web_server() as server:
        assert (await ask(server, "anything"))[0] == 200


async def test_who_asks_before_sending_is_told(server: WebServer) -> None:
    host, port = server.runner.addresses[0][:2]
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"POST /v1/files HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 1000000\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 401")
    writer.close()


async def test_openai_s_client(server: WebServer) -> None:
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=ALICE, max_retries=0) as client:
        assert (await client.completions.create(model="org/tiny", prompt="hi", max_tokens=4)).choices
        with pytest.raises(openai.AuthenticationError) as caught:
            await client.with_options(api_key="sk-wrong-01234").models.list()
        assert caught.value.code == "invalid_api_key"


# ---- limits


async def test_requests_and_tokens_of_a_key() -> None:
    async with web_server(FakeScheduler(held=True), keys=KEYS) as server:
        first = asyncio.create_task(ask(server, ALICE, n=2))  # 3 + 2 x 10 tokens
        while not server.engine.num_requests:
            await asyncio.sleep(0.001)
        status, answer, retry = await ask(server, ALICE, max_tokens=15)
        assert (status, retry) == (429, "1")
        assert "key alice: 1 requests with 23 tokens" in checked_error(answer)["message"]
        second = asyncio.create_task(ask(server, ALICE))
        while server.engine.num_requests < 2:
            await asyncio.sleep(0.001)
        assert (await ask(server, ALICE, max_tokens=1))[0] == 429
        other = asyncio.create_task(ask(server, BOB))
        while server.engine.num_requests < 3:
            await asyncio.sleep(0.001)
        for _ in range(12):
            server.scheduler.step()
        assert [(await each)[0] for each in (first, second, other)] == [200, 200, 200]
        status, answer, _ = await ask(server, ALICE, max_tokens=38)
        assert status == 400
        assert checked_error(answer)["param"] == "max_tokens"
        accounts = server.app[SERVICE].accounts
        assert accounts.total.num_requests == accounts.total.num_tokens == 0
        assert accounts.by_name["key alice"].num_refused == 2


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not is_so():
            await asyncio.sleep(0.001)


async def test_requests_wait_in_order_for_room() -> None:
    """One at a time of alice's; who waits longest is next; bob is not in their way, nor they in his."""
    async with web_server(FakeScheduler(held=True), keys=KEYS, max_waiting=2) as server:
        alice = server.app[GUARD].owner_account("name alice")
        assert alice is not None
        first = asyncio.create_task(ask(server, ALICE, max_tokens=30))
        await until(lambda: server.engine.num_requests == 1)
        others = []
        for number in range(1, 3):
            others.append(asyncio.create_task(ask(server, ALICE, max_tokens=20)))
            await until(lambda expected=number: alice.num_waiting == expected)  # type: ignore[misc]
        status, _, retry = await ask(server, ALICE)
        assert (status, retry) == (429, "1")
        bob = asyncio.create_task(ask(server, BOB))
        await until(lambda: server.engine.num_requests == 2)
        async with server.http.get(server.url + "/metrics", headers=bearer(BOB)) as response:
            assert 'toka:waiting_requests{owner="key alice"} 2.0' in await response.text()
        for running in (first, *others):
            while not running.done():
                server.scheduler.step()
                await asyncio.sleep(0)
            assert alice.num_requests <= 1
        assert [(await each)[0] for each in (first, *others, bob)] == [200] * 4
        assert (alice.num_requests, alice.num_tokens, alice.num_waiting, alice.num_refused) == (0, 0, 0, 1)


async def test_who_hangs_up_waits_no_more() -> None:
    async with web_server(FakeScheduler(held=True), max_requests=1, max_waiting=5) as server:
        total = server.app[SERVICE].accounts.total
        first = asyncio.create_task(ask(server, ""))
        await until(lambda: server.engine.num_requests == 1)
        second = asyncio.create_task(ask(server, ""))
        await until(lambda: total.num_waiting == 1)
        third = asyncio.create_task(ask(server, ""))
        await until(lambda: total.num_waiting == 2)
        second.cancel()
        await until(lambda: total.num_waiting == 1)
        while not third.done():
            server.scheduler.step()
            await asyncio.sleep(0)
        assert [(await each)[0] for each in (first, third)] == [200, 200]
        assert (total.num_waiting, total.num_requests) == (0, 0)


async def test_the_deadline_holds_while_waiting() -> None:
    async with web_server(FakeScheduler(held=True), max_requests=1, max_waiting=5, request_timeout=0.2) as server:
        started = asyncio.get_running_loop().time()
        answers = await asyncio.gather(*(ask(server, "") for _ in range(3)))
        assert [status for status, _, _ in answers] == [504] * 3
        assert asyncio.get_running_loop().time() - started < 0.39  # each from its own arrival, not one after the other
        assert server.app[SERVICE].accounts.total.num_requests == 0


async def test_a_deadline_counts_from_before_the_wait() -> None:
    async with web_server(FakeScheduler(held=True), max_requests=1, max_waiting=5, request_timeout=0.4) as server:
        first = asyncio.create_task(ask(server, ""))
        await until(lambda: server.engine.num_requests == 1)
        started = asyncio.get_running_loop().time()
        second = asyncio.create_task(ask(server, "", max_tokens=100))
        await asyncio.sleep(0.2)
        while not first.done():
            server.scheduler.step()
            await asyncio.sleep(0)
        assert (await second)[0] == 504
        assert asyncio.get_running_loop().time() - started < 0.55


async def test_who_waits_when_the_engine_stops_is_told() -> None:
    async with web_server(FakeScheduler(held=True), max_requests=1, max_waiting=5) as server:
        asked = [asyncio.create_task(ask(server, "")) for _ in range(3)]
        await until(lambda: server.app[SERVICE].accounts.total.num_waiting == 2)
        server.engine.fail_all("gone")
        assert [(await each)[0] for each in asked] == [500, 503, 503]


async def test_tokens_in_total() -> None:
    async with web_server(FakeScheduler(held=True), max_held_tokens=30) as server:
        first = asyncio.create_task(ask(server, "", max_tokens=20))
        while not server.engine.num_requests:
            await asyncio.sleep(0.001)
        status, answer, retry = await ask(server, "")
        assert (status, retry) == (429, "1")
        assert checked_error(answer)["message"].startswith("this server: 1 requests with 23 tokens")
        first.cancel()
        while server.engine.num_requests:
            await asyncio.sleep(0.001)
        assert server.app[SERVICE].accounts.total.num_tokens == 0


async def test_lines_of_batches_leave_half_to_connections(tmp_path: Path) -> None:
    """And all of them end, but the one that asks for more than that."""
    body = {"prompt": [1, 2, 3], "max_tokens": 10}
    line = {"method": "POST", "url": "/v1/completions", "body": body}
    lines = [json.dumps({"custom_id": str(number), **line}) for number in range(20)]
    lines.append(json.dumps({"custom_id": "large", **line, "body": body | {"max_tokens": 40}}))
    async with web_server(data_dir=str(tmp_path), max_held_tokens=60) as server:
        most, account = 0, server.app[SERVICE].accounts.batches
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client:
            file = await client.files.create(file=("in", "\n".join(lines).encode()), purpose="batch")
            batch = await client.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
            )
            async with asyncio.timeout(10):
                while batch.status != "completed":
                    most = max(most, account.num_tokens)
                    await asyncio.sleep(0.001)
                    batch = await client.batches.retrieve(batch.id)
        assert batch.request_counts is not None
        assert (batch.request_counts.completed, batch.request_counts.failed) == (20, 1)
        assert most <= 30
        assert (account.num_requests, account.num_tokens) == (0, 0)


async def batch_of(client: openai.AsyncOpenAI, num_lines: int) -> Batch:
    body = {"prompt": [1, 2, 3], "max_tokens": 10}
    line = {"method": "POST", "url": "/v1/completions", "body": body}
    lines = [json.dumps({"custom_id": str(number), **line}) for number in range(num_lines)]
    file = await client.files.create(file=("in", "\n".join(lines).encode()), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")


async def ended(client: openai.AsyncOpenAI, batch: Batch, each: Callable[[], None] = lambda: None) -> Batch:
    async with asyncio.timeout(10):
        while batch.status != "completed":
            each()
            await asyncio.sleep(0.001)
            batch = await client.batches.retrieve(batch.id)
    return batch


async def test_a_batch_counts_in_its_key_and_waits_at_its_limits(server: WebServer) -> None:
    """All lines end; no more than the key's 2 requests and 40 tokens run."""
    most = [0, 0]
    alice = server.app[SERVICE].accounts.open("key alice", 2, 40)

    def look() -> None:
        most[:] = max(most[0], alice.num_requests), max(most[1], alice.num_tokens)

    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=ALICE, max_retries=0) as client:
        batch = await ended(client, await batch_of(client, 200), look)
    assert batch.request_counts == BatchRequestCounts(completed=200, failed=0, total=200)
    assert 0 < most[0] <= 2
    assert 0 < most[1] <= 40
    assert (alice.num_requests, alice.num_tokens, alice.num_refused) == (0, 0, 0)


async def test_a_batch_is_not_in_line_behind_another_key_s(tmp_path: Path) -> None:
    async with (
        web_server(FakeScheduler(held=True), keys=KEYS, data_dir=str(tmp_path)) as server,
        openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=ALICE, max_retries=0) as client,
        openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=BOB, max_retries=0) as other,
    ):
        accounts = server.app[SERVICE].accounts
        await batch_of(client, 50)
        await until(lambda: getattr(accounts.by_name.get("batches of key alice"), "num_waiting", 0) > 0)
        await batch_of(other, 20)
        await until(lambda: getattr(accounts.by_name.get("key bob"), "num_requests", 0) == 20)
        assert accounts.by_name["key alice"].num_requests <= 2


async def test_a_key_s_request_goes_before_its_batch(tmp_path: Path) -> None:
    async with (
        web_server(FakeScheduler(held=True), keys=KEYS, data_dir=str(tmp_path), max_waiting=5) as server,
        openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=ALICE, max_retries=0) as client,
    ):
        await batch_of(client, 50)
        accounts = server.app[SERVICE].accounts
        await until(lambda: "batches of key alice" in accounts.by_name)
        lines = accounts.by_name["batches of key alice"]
        await until(lambda: lines.num_waiting > 0)
        asked = asyncio.create_task(ask(server, ALICE))
        await until(lambda: accounts.by_name["key alice"].num_waiting == 1)
        num_steps = 0
        while not asked.done():
            server.scheduler.step()
            num_steps += 1
            await asyncio.sleep(0)
        assert (await asked)[0] == 200
        assert lines.num_waiting > 0


async def test_files_and_batches_are_their_key_s(server: WebServer) -> None:
    async with (
        openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=ALICE, max_retries=0) as client,
        openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=BOB, max_retries=0) as other,
    ):
        batch = await ended(client, await batch_of(client, 3))
        assert batch.output_file_id is not None
        for file_id in (batch.input_file_id, batch.output_file_id):
            assert (await client.files.retrieve(file_id)).id == file_id
            for attempt in (other.files.retrieve, other.files.content, other.files.delete):
                with pytest.raises(openai.NotFoundError):
                    await attempt(file_id)
            with pytest.raises(openai.NotFoundError):
                await other.files.list(after=file_id)
        for action in (other.batches.retrieve, other.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                await action(batch.id)
        with pytest.raises(openai.NotFoundError):
            await other.batches.list(after=batch.id)
        with pytest.raises(openai.BadRequestError, match="there is no file"):
            await other.batches.create(
                input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h"
            )
        theirs = await batch_of(other, 1)
        for lister, mine in ((client, batch), (other, theirs)):
            assert [each.id for each in (await lister.batches.list()).data] == [mine.id]
            files = {each.id for each in (await lister.files.list()).data}
            assert mine.input_file_id in files
        assert len((await client.files.list()).data) == 2
        assert (await client.files.delete(batch.output_file_id)).deleted


async def test_after_a_restart_keys_may_be_gone(tmp_path: Path) -> None:
    """A batch of a key that is gone runs, in the server's limits; its name brings its files back."""
    data_dir = str(tmp_path)
    held = FakeScheduler(held=True)
    async with (
        web_server(held, keys=KEYS, data_dir=data_dir) as server,
        openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=ALICE, max_retries=0) as client,
    ):
        batch = await batch_of(client, 5)
        await until(lambda: server.engine.num_requests == 2)
    async with web_server(keys=Keys((Key(digest_of(BOB), "bob"),)), data_dir=data_dir) as server:
        service = server.app[BATCHES]
        assert service is not None
        while (record := await service.writer.run(lambda: service.store.batch(batch.id))).record.status != "completed":
            await asyncio.sleep(0.001)
        assert record.progress.completed == 5
        assert "key alice" not in server.app[SERVICE].accounts.by_name
        async with server.http.get(f"{server.url}/v1/batches/{batch.id}", headers=bearer(BOB)) as response:
            assert response.status == 404
    renewed = "sk-alice-another"
    async with (
        web_server(keys=Keys((Key(digest_of(renewed), "alice"),)), data_dir=data_dir) as server,
        openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=renewed, max_retries=0) as client,
    ):
        assert (await client.batches.retrieve(batch.id)).status == "completed"
    async with web_server(data_dir=data_dir) as server:  # without keys, all is everybody's
        assert (await server.get(f"/v1/batches/{batch.id}"))[0] == 200
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client:
            shared = await ended(client, await batch_of(client, 1))
    async with (
        web_server(keys=KEYS, data_dir=data_dir) as server,
        openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=BOB, max_retries=0) as client,
    ):
        assert [each.id for each in (await client.batches.list()).data] == [shared.id]


async def test_more_samples_and_longer_than_allowed() -> None:
    async with web_server(max_n=4) as server:
        for fields, param in (({"n": 5}, "n"), ({"max_tokens": 1000}, "max_tokens"), ({"prompt": [1] * 600}, "prompt")):
            status, answer, _ = await ask(server, "", **fields)
            assert (status, checked_error(answer)["param"] in (param, "max_tokens")) == (400, True), answer


async def test_a_body_that_grows_when_unpacked() -> None:
    packed = gzip.compress(bytes(100 << 20), 1)
    async with (
        web_server(max_body_mb=1) as server,
        server.http.post(server.url + "/v1/completions", data=packed, headers={"Content-Encoding": "gzip"}) as response,
    ):
        assert response.status in (400, 413)
        checked_error(await response.json())


# ---- deadlines


async def test_a_request_that_takes_too_long() -> None:
    async with web_server(FakeScheduler(held=True), request_timeout=0.05) as server:
        status, answer, _ = await ask(server, "", n=2)
        error = checked_error(answer)
        assert (status, error["code"], error["type"]) == (504, "timeout", "server_error")
        assert server.engine.num_requests == 0
        server.scheduler.step()
        assert any(isinstance(message, Cancel) for message in server.scheduler.log)
        assert server.app[SERVICE].accounts.total.num_tokens == 0


async def test_a_stream_that_takes_too_long() -> None:
    async with web_server(FakeScheduler(held=True), request_timeout=0.5) as server:

        async def answer_some() -> None:
            while not server.engine.num_requests:
                await asyncio.sleep(0.001)
            for _ in range(20):  # a token may be a part of a character, which is no event yet
                server.scheduler.step()
                await asyncio.sleep(0.005)

        answering = asyncio.create_task(answer_some())
        events = await server.events("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 50})
        await answering
        assert events[-1]["error"]["code"] == "timeout"
        assert len(events) > 1
        assert server.engine.num_requests == 0


async def test_a_stream_that_is_not_read(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("toka_async.server.respond.GRACE", 0.05)
    async with web_server(request_timeout=0.3) as server:
        reader, writer = await asyncio.open_connection(*server.runner.addresses[0][:2], limit=1024)
        while server.runner.server is None or not server.runner.server.connections:
            await asyncio.sleep(0)
        transport = server.runner.server.connections[0].transport
        assert transport is not None
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        body = {"prompt": [1, 2, 3], "max_tokens": 400, "n": 60, "logprobs": 5, "stream": True}
        data = json.dumps(body).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
        await reader.readline()
        assert server.app[SERVICE].accounts.total.num_requests == 1
        async with asyncio.timeout(5):
            while server.app[SERVICE].accounts.total.num_requests or server.runner.server.connections:
                await asyncio.sleep(0.01)
        assert not server.engine.busy
        writer.transport.abort()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_body_that_does_not_come() -> None:
    async with web_server(request_timeout=0.05) as server:
        host, port = server.runner.addresses[0][:2]
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        async with asyncio.timeout(5):
            assert (await reader.readline()).startswith(b"HTTP/1.1 408")
            assert b"Connection: close" in await reader.readuntil(b"\r\n\r\n")
        writer.close()


# ---- browsers


async def test_headers_of_every_answer(server: WebServer) -> None:
    for path in ("/health", "/metrics", "/v1/models", "/nowhere", "/v1/files"):
        for headers in ({}, bearer(BOB)):
            async with server.http.get(server.url + path, headers=headers) as response:
                assert response.headers["X-Content-Type-Options"] == "nosniff"
                assert "default-src 'none'" in response.headers["Content-Security-Policy"]
                assert response.headers["Server"] == "toka-async"
                assert "html" not in response.content_type
    with socket.create_connection(server.runner.addresses[0][:2]) as raw:
        raw.sendall(b"no http at all\r\n\r\n")
        answer = await asyncio.get_running_loop().run_in_executor(None, raw.recv, 4096)
    assert answer.startswith(b"HTTP/1.")
    assert b"X-Content-Type-Options: nosniff" in answer


async def test_a_file_is_never_a_page(server: WebServer) -> None:
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", b"<script>alert(1)</script>", filename="x.html", content_type="text/html")
    async with server.http.post(server.url + "/v1/files", data=form, headers=bearer(BOB)) as response:
        file_id = (await response.json())["id"]
    async with server.http.get(f"{server.url}/v1/files/{file_id}/content", headers=bearer(BOB)) as response:
        assert response.content_type == "application/octet-stream"
        assert response.headers["Content-Disposition"] == "attachment"
        assert response.headers["X-Content-Type-Options"] == "nosniff"


# ---- paths

HOSTILE = [
    "../secret",
    "..%2fsecret",
    "%2e%2e%2fsecret",
    "..%5csecret",
    "%2fetc%2fpasswd",
    "file-%00",
    "file-..",
    "%00",
]


@pytest.mark.parametrize("name", HOSTILE)
async def test_no_id_is_a_path(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_text("hidden words")
    before = sorted(tmp_path.rglob("*"))
    async with web_server(data_dir=str(tmp_path / "data")) as server:
        for method in ("GET", "DELETE", "POST"):
            for path in (f"/v1/files/{name}", f"/v1/files/{name}/content", f"/v1/batches/{name}/cancel"):
                host, port = server.runner.addresses[0][:2]
                reader, writer = await asyncio.open_connection(host, port)  # no client that tidies the path up
                writer.write(f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
                answer = await reader.read()
                assert answer.split()[1] in (b"400", b"404", b"405"), answer
                assert b"hidden" not in answer
                writer.close()
        body = {"input_file_id": name.replace("%2f", "/"), "endpoint": "/v1/completions", "completion_window": "24h"}
        assert (await server.post("/v1/batches", body))[0] == 400
    assert [each for each in sorted(tmp_path.rglob("*")) if (tmp_path / "data") not in (each, *each.parents)] == before


@pytest.mark.parametrize("name", ["../../out", "/tmp/toka-out", "a/../../out", "..", "a\\..\\out"])
async def test_no_name_is_a_path(tmp_path: Path, name: str) -> None:
    async with web_server(data_dir=str(tmp_path / "data")) as server:
        form = aiohttp.FormData({"purpose": "batch"}, quote_fields=False)
        form.add_field("file", b"x", filename=name)
        async with server.http.post(server.url + "/v1/files", data=form) as response:
            assert response.status in (200, 400), await response.text()
        batches = server.app[BATCHES]
        assert batches is not None
        assert not Path("/tmp/toka-out").exists()
        assert [each.name for each in tmp_path.iterdir()] == ["data"]
        assert not [each for each in tmp_path.rglob("*") if "out" in each.name]


# ---- logs


@pytest.mark.parametrize("asked", [False, True])
async def test_prompts_are_logged_only_when_asked_for(caplog: pytest.LogCaptureFixture, asked: bool) -> None:
    caplog.set_level(logging.DEBUG)
    async with web_server(log_prompts=asked) as server:
        await ask(server, "", prompt="private\nwords")
        await ask(server, "", prompt="private words", max_tokens=10_000)
        await server.post("/v1/completions", '{"prompt": "private words"')
        chat = {"messages": [{"role": "user", "content": "private words"}], "max_tokens": 4}
        await server.ok("/v1/chat/completions", chat)
    lines = [record.getMessage() for record in caplog.records if "private" in record.getMessage()]
    assert len(lines) == (2 if asked else 0)
    assert not any("\n" in line for line in lines)


async def test_a_log_line_stays_one(caplog: pytest.LogCaptureFixture, server: WebServer) -> None:
    batches = server.app[BATCHES]
    assert batches is not None
    batches.store.file = lambda *_: 1 / 0  # type: ignore[method-assign,assignment]
    async with server.http.get(server.url + "/v1/files/x%0aERROR%20forged", headers=bearer(BOB)) as response:
        assert response.status == 500
    (line,) = (record.getMessage() for record in caplog.records if "failed" in record.getMessage())
    assert "\n" not in line
