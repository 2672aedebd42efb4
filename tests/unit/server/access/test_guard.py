from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import openai
import pytest

from tests.drivers.until import turns, until
from tests.drivers.web_server import JSON_HEAD, WebServer, checked_error, web_server
from tests.fakes.scheduler import FakeScheduler
from tests.processes.keyed import ALICE, BOB, KEYS, ask, bearer
from tests.unit.server.test_app import transports
from toka_async.config import AuthConfig
from toka_async.server.access.guard import GUARD
from toka_async.server.access.keys import Key, Keys, KeySource, digest_key
from toka_async.server.http.files import BATCHES
from toka_async.server.http.respond import SERVICE

READ = ["models", "models/org/tiny", "files", "batches"]
SENT = ["v1/completions", "v1/chat/completions", "v1/chat/completions/batch", "v1/files", "tokenize", "detokenize"]
ROUTES = [
    *(("GET", f"/v1/{name}") for name in READ),
    *(("GET", f"/{name}") for name in ("metrics", "version", "nowhere", "health/x")),
    *(("POST", f"/{name}") for name in SENT),
    *(("PUT", "/v1/models"), ("OPTIONS", "/v1/completions")),
]


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


async def test_the_other_header_of_a_key(server: WebServer) -> None:
    for headers, status in (
        ({"X-Api-Key": ALICE}, 200),
        ({"x-api-key": "sk-wrong-01234"}, 401),
        ({"X-Api-Key": ALICE, "Authorization": "Bearer sk-wrong-01234"}, 401),
    ):
        async with server.http.get(server.url + "/v1/models", headers=headers) as response:
            assert response.status == status


@pytest.mark.parametrize("expect", [False, True])
async def test_a_key_is_looked_up_once_for_a_request(
    server: WebServer, monkeypatch: pytest.MonkeyPatch, expect: bool
) -> None:
    """Also with a large body, which waits for room in the key's share, and one that is asked for before it is sent."""
    looked_up: list[str] = []
    find = Keys.find

    def note(keys: Keys, text: str) -> Key | None:
        looked_up.append(text)
        return find(keys, text)

    monkeypatch.setattr(Keys, "find", note)
    body = {"prompt": [1, 2, 3], "max_tokens": 2, "metadata": {"long": " " * 100_000}}
    url = server.url + "/v1/completions"
    async with server.http.post(url, json=body, headers=bearer(ALICE), expect100=expect) as response:
        assert response.status == 200, await response.text()
    assert looked_up == [ALICE]
    async with server.http.get(server.url + "/metrics", headers=bearer(BOB)) as response:
        assert 'owner="key bob"' in await response.text()
    assert looked_up == [ALICE, BOB]


async def test_prompts_of_other_keys_are_not_found_in_the_cache(server: WebServer) -> None:
    """A count of cached tokens would tell what others have asked."""
    for key in (ALICE, BOB, ALICE):
        assert (await ask(server, key))[0] == 200
    assert (await ask(server, ALICE, cache_salt="x"))[0] == 200
    assert (await ask(server, BOB, cache_salt="x"))[0] == 200
    salts = [message.salt for message in server.scheduler.submits]
    assert salts[0] == salts[2]
    assert len(set(salts)) == 4
    assert 0 not in salts


async def test_without_keys_everybody_shares() -> None:
    async with web_server() as server:
        await server.ok("/v1/completions", {"prompt": "x", "max_tokens": 1})
        await server.ok("/v1/completions", {"prompt": "x", "max_tokens": 1, "cache_salt": "mine"})
        first, salted = (message.salt for message in server.scheduler.submits)
        assert first == 0 != salted


async def test_keys_come_and_go_while_it_serves(tmp_path: Path) -> None:
    path, now = tmp_path / "keys", [0.0]
    path.write_text(f"{ALICE} alice max_requests=1\n")
    source = KeySource(AuthConfig(api_keys=str(path)), {}, lambda: now[0])
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
    async with web_server(keys=KEYS, open_metrics=True) as server, server.http.get(server.url + "/metrics") as response:
        assert response.status == 200
        text = await response.text()
    assert 'toka:held_requests{owner="this server"} 0.0' in text
    assert "toka:unauthorized_requests_total 0.0" in text


async def test_who_sees_whose_load() -> None:
    """A key itself, one that is meant to see all all, and nobody without a key."""
    watcher = "sk-watcher-01234"
    keys = Keys((*KEYS.keys, Key(digest_key(watcher), "watcher", sees_all=True)))
    async with web_server(keys=keys, open_metrics=True) as server:
        for key in (ALICE, BOB):
            assert (await ask(server, key))[0] == 200
        for headers, seen in (
            ({}, set()),
            (bearer("sk-wrong-01234"), set()),
            (bearer(ALICE), {"alice"}),
            (bearer(BOB), {"bob"}),
            (bearer(watcher), {"alice", "bob"}),
        ):
            async with server.http.get(server.url + "/metrics", headers=headers) as response:
                text = await response.text()
            assert {name for name in ("alice", "bob") if f'owner="key {name}"' in text} == seen
            assert 'toka:held_requests{owner="this server"} 0.0' in text
            assert text.count("# TYPE toka:held_requests gauge") == 1


async def test_without_keys_everybody_may_ask() -> None:
    async with web_server() as server:
        assert (await ask(server, "anything"))[0] == 200


async def test_who_asks_before_sending_is_told(server: WebServer) -> None:
    host, port = server.address
    reader, writer = await asyncio.open_connection(host, port)
    form = b"Content-Type: multipart/form-data; boundary=x\r\n"
    writer.write(
        b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\n"
        + form
        + b"Expect: 100-continue\r\nContent-Length: 1000000\r\n\r\n"
    )
    assert (await reader.readline()).startswith(b"HTTP/1.1 401")
    writer.close()


async def test_openai_s_client(server: WebServer) -> None:
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=ALICE, max_retries=0) as client:
        assert (await client.completions.create(model="org/tiny", prompt="hi", max_tokens=4)).choices
        with pytest.raises(openai.AuthenticationError) as caught:
            await client.with_options(api_key="sk-wrong-01234").models.list()
        assert caught.value.code == "invalid_api_key"


async def test_more_samples_and_longer_than_allowed() -> None:
    async with web_server(max_n=4) as server:
        for fields, param in (({"n": 5}, "n"), ({"max_tokens": 1000}, "max_tokens"), ({"prompt": [1] * 600}, "prompt")):
            status, answer, _ = await ask(server, "", **fields)
            assert (status, checked_error(answer)["param"] in (param, "max_tokens")) == (400, True), answer


# ---- deadlines


async def test_a_request_that_takes_too_long() -> None:
    async with web_server(FakeScheduler(held=True), request_timeout=0.05) as server:
        status, answer, _ = await ask(server, "", n=2)
        error = checked_error(answer)
        assert (status, error["code"], error["type"]) == (504, "timeout", "server_error")
        assert server.engine.num_requests == 0
        server.scheduler.step()
        assert server.scheduler.cancelled
        assert server.app[SERVICE].accounts.total.num_tokens == 0


async def test_a_stream_that_takes_too_long() -> None:
    async with web_server(FakeScheduler(held=True), request_timeout=0.5) as server:

        async def answer_some() -> None:
            await until(lambda: server.engine.num_requests)
            for _ in range(20):  # a token may be a part of a character, which is no event yet
                server.scheduler.step()
                await turns(10)

        answering = asyncio.create_task(answer_some())
        events = await server.events("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 50})
        await answering
        assert events[-1]["error"]["code"] == "timeout"
        assert len(events) > 1
        assert server.engine.num_requests == 0


async def test_a_stream_that_is_not_read(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("toka_async.server.http.respond.GRACE", 0.05)
    async with web_server(request_timeout=1.0) as server:
        reader, writer = await asyncio.open_connection(*server.address, limit=1024)
        (transport,) = await until(lambda: transports(server))
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        body = {"prompt": [1, 2, 3], "max_tokens": 400, "n": 60, "logprobs": 5, "stream": True}
        data = json.dumps(body).encode()
        writer.write(JSON_HEAD + b"Content-Length: %d\r\n\r\n" % len(data) + data)
        await reader.readline()
        assert server.app[SERVICE].accounts.total.num_requests == 1
        await until(lambda: not server.app[SERVICE].accounts.total.num_requests and not transports(server))
        assert not server.engine.busy
        writer.transport.abort()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_body_that_does_not_come() -> None:
    async with web_server(request_timeout=0.05) as server:
        host, port = server.address
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(JSON_HEAD + b"Content-Length: 100\r\n\r\n{")
        async with asyncio.timeout(60):
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
    with socket.create_connection(server.address) as raw:
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
    *("../secret", "..%2fsecret", "%2e%2e%2fsecret", "..%5csecret"),
    *("%2fetc%2fpasswd", "file-%00", "file-..", "%00"),
]


@pytest.mark.parametrize("name", HOSTILE)
async def test_no_id_is_a_path(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_text("hidden words")
    before = sorted(tmp_path.rglob("*"))
    async with web_server(data_dir=str(tmp_path / "data")) as server:
        for method in ("GET", "DELETE", "POST"):
            for path in (f"/v1/files/{name}", f"/v1/files/{name}/content", f"/v1/batches/{name}/cancel"):
                host, port = server.address
                reader, writer = await asyncio.open_connection(host, port)  # no client that tidies the path up
                writer.write(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
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


# ---- admins


async def test_what_changes_the_model_needs_a_key_of_its_own() -> None:
    admin = "sk-admin-012345"
    keys = Keys((*KEYS.keys, Key(digest_key(admin), "trainer", is_admin=True)))
    async with web_server(keys=keys, admin=True) as server:
        for key, path, status in (
            (ALICE, "/resume", 403),
            (admin, "/resume", 200),
            (admin, "/detokenize", 200),
            (ALICE, "/detokenize", 200),
            ("sk-wrong-01234", "/resume", 401),
        ):
            body: dict[str, list[int]] = {"tokens": []} if path == "/detokenize" else {}
            async with server.http.post(server.url + path, json=body, headers=bearer(key)) as response:
                assert response.status == status, (key, path)
                if status == 403:
                    assert checked_error(await response.json())["code"] == "admin_key_needed"
        async with server.http.get(server.url + "/is_paused", headers=bearer(ALICE)) as response:
            assert response.status == 200


async def test_on_this_machine_any_key_will_do() -> None:
    """Where there are keys of admins, they are needed; without them a start refuses addresses that others reach."""
    async with web_server(keys=KEYS, admin=True) as server:
        async with server.http.post(server.url + "/resume", headers=bearer(ALICE)) as response:
            assert response.status == 200
        async with server.http.post(server.url + "/resume") as response:
            assert response.status == 401


async def test_a_page_may_not_change_the_model() -> None:
    async with web_server(admin=True) as server:
        headers = {"Origin": "https://elsewhere.example", "Sec-Fetch-Site": "cross-site"}
        async with server.http.post(server.url + "/pause", headers=headers) as response:
            assert response.status == 403
