from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.drivers.web_server import JSON, WebServer, checked_error, web_server
from tests.processes.keyed import ALICE, KEYS, bearer
from toka_async.config import AuthConfig, ConfigError
from toka_async.server.access.origins import Origins, is_loopback, read_origins

EVIL = "http://evil.example"
BODY = json.dumps({"prompt": "x", "max_tokens": 1})
READ = ["/", "/metrics", "/load", "/ping", "/health", "/v1/models", "/v1/files", "/openapi.json", "/nowhere"]
SENT = ["/v1/completions", "/v1/files", "/v1/batches", "/v1/batches/batch_1/cancel", "/tokenize"]
ROUTES = [
    *(("GET", path) for path in READ),
    *(("POST", path) for path in SENT),
    *(("HEAD", "/v1/models"), ("DELETE", "/v1/files/file-1")),
]


async def ask(
    server: WebServer, method: str, path: str, headers: Mapping[str, str], body: str | None = None
) -> tuple[int, Mapping[str, str], Any]:
    """Status, headers and the decoded answer."""
    async with server.http.request(method, server.url + path, headers=headers, data=body) as response:
        raw = await response.read()
        is_json = raw and response.content_type == "application/json"
        return response.status, response.headers, json.loads(raw) if is_json else raw


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "empty"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"},
        {"Sec-Fetch-Site": "same-site", "Origin": "http://localhost:3000"},
        {"Origin": EVIL},
        {"Origin": "null"},
        {"Host": "evil.example:10210"},
        {"Host": "evil.example:10210", "Origin": "http://evil.example:10210", "Sec-Fetch-Site": "same-origin"},
        {"Host": "127.0.0.1.evil.example"},
        {"Host": ""},
    ],
)
async def test_a_page_of_another_site_reaches_no_route(
    tmp_path: Path, method: str, path: str, headers: dict[str, str]
) -> None:
    async with web_server(data_dir=str(tmp_path)) as server:
        status, answered, error = await ask(server, method, path, JSON | headers, BODY if method == "POST" else None)
        assert status == 403
        assert method == "HEAD" or checked_error(error)["code"] == "origin_not_allowed"
        assert "Access-Control-Allow-Origin" not in answered
        assert not server.scheduler.log
        assert b"toka:foreign_requests_total 1.0" in (await ask(server, "GET", "/metrics", {}))[2]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"},
        {"Sec-Fetch-Site": "same-origin"},
        {"Sec-Fetch-Mode": "cors"},
        {"Host": "localhost:1"},
        {"Host": "LOCALHOST."},
        {"Host": "toka.localhost"},
        {"Host": "[::1]:10210"},
        {"Host": "192.168.1.7:80"},
    ],
)
async def test_programs_people_and_the_servers_own_page(headers: dict[str, str]) -> None:
    async with web_server() as server:
        assert (await ask(server, "GET", "/v1/models", headers))[0] == 200


async def test_the_servers_own_page_asks() -> None:
    """Also in a browser without Sec-Fetch-Site, whose Origin is what it asked for."""
    async with web_server() as server:
        for headers in ({"Sec-Fetch-Site": "same-origin"}, {}):
            assert (await ask(server, "POST", "/v1/completions", JSON | headers | {"Origin": server.url}, BODY))[
                0
            ] == 200


async def test_a_key_may_come_from_anywhere() -> None:
    """No browser adds it on its own; a proxy on this machine need not be known."""
    async with web_server(keys=KEYS) as server:
        for headers in ({"Origin": EVIL}, {"Host": "llm.example.org"}, {"Sec-Fetch-Site": "cross-site"}):
            assert (await ask(server, "GET", "/v1/models", headers | bearer(ALICE)))[0] == 200
            assert (await ask(server, "GET", "/v1/models", headers))[0] == 401


async def test_names_that_are_allowed() -> None:
    async with web_server(allowed_hosts="llm.example.org, other") as server:
        for host, status in (("LLM.example.org:443", 200), ("other", 200), ("evil.example", 403)):
            assert (await ask(server, "GET", "/v1/models", {"Host": host}))[0] == status
    async with web_server(allowed_hosts="*") as server:
        assert (await ask(server, "GET", "/v1/models", {"Host": "any.example"}))[0] == 200


async def test_only_names_of_loopback_addresses_are_checked() -> None:
    origins = Origins()
    assert not origins.is_own_host("node7")
    for address, is_one in (
        (("127.0.0.1", 1), True),
        (("127.0.1.1", 1), True),
        (("::1", 1, 0, 0), True),
        (("::ffff:127.0.0.1", 1, 0, 0), True),
        (("192.168.1.7", 1), False),
        (("fe80::1%eth0", 1, 0, 2), False),
        ("/run/socket", False),
        (None, True),
    ):
        assert is_loopback(address) is is_one


@pytest.mark.parametrize("keys", [None, KEYS])
@pytest.mark.parametrize("allowed", ["https://app.example.org, http://localhost:3000", "*"])
async def test_a_page_of_an_allowed_origin(keys: Any, allowed: str) -> None:
    """It asks, sends, and sees the answer, an error too; others see nothing."""
    async with web_server(keys=keys, allowed_origins=allowed) as server:
        page = {"Origin": "https://app.example.org", "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors"}
        wanted = {
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,x-stainless",
        }
        status, headers, body = await ask(server, "OPTIONS", "/v1/completions", page | wanted)
        assert (status, body) == (204, b"")
        assert headers["Access-Control-Allow-Origin"] == "https://app.example.org"
        assert headers["Access-Control-Allow-Headers"] == "authorization,x-stainless"
        assert "POST" in headers["Access-Control-Allow-Methods"]
        for sent, status in ((BODY, 200), ("{", 400)):
            got, headers, _ = await ask(server, "POST", "/v1/completions", JSON | page | bearer(ALICE), sent)
            assert got == status
            assert headers["Access-Control-Allow-Origin"] == "https://app.example.org"
            assert (headers["Vary"], "X-Request-Id" in headers["Access-Control-Expose-Headers"]) == ("Origin", True)
        status, headers, _ = await ask(server, "OPTIONS", "/v1/completions", page | wanted | {"Origin": EVIL})
        assert status == (204 if allowed == "*" else 403)
        assert ("Access-Control-Allow-Origin" in headers) is (allowed == "*")
        assert "Access-Control-Allow-Origin" not in (await ask(server, "GET", "/ping", {}))[1]


async def test_an_origin_is_not_allowed_unless_it_is_named() -> None:
    async with web_server(keys=KEYS) as server:
        wanted = {"Origin": EVIL, "Access-Control-Request-Method": "POST"}
        status, headers, error = await ask(server, "OPTIONS", "/v1/completions", wanted)
        assert (status, checked_error(error)["code"]) == (403, "origin_not_allowed")
        assert not [name for name in headers if name.startswith("Access-Control")]
        assert (await ask(server, "OPTIONS", "/v1/completions", bearer(ALICE)))[0] == 405


async def test_a_page_is_refused_before_its_body_is_asked_for() -> None:
    async with web_server() as server:
        reader, writer = await asyncio.open_connection(*server.address)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nOrigin: {EVIL}\r\nExpect: 100-continue\r\n"
        writer.write(f"{head}Content-Type: application/json\r\nContent-Length: 9\r\n\r\n".encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 403 ")
        writer.close()


@pytest.mark.parametrize(
    ("origins", "hosts", "message"),
    [
        ("app.example.org", "", r"auth\.allowed_origins: .*'app\.example\.org'"),
        ("https://app.example.org/path", "", r"auth\.allowed_origins: .*/path"),
        ("https://*.example.org", "", r"auth\.allowed_origins"),
        ("", "http://app", r"auth\.allowed_hosts: .*'http://app'"),
        ("", "app:80", r"auth\.allowed_hosts"),
    ],
)
def test_wrong_settings(origins: str, hosts: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_origins(AuthConfig(allowed_origins=origins, allowed_hosts=hosts), "127.0.0.1")


def test_settings() -> None:
    made = read_origins(AuthConfig(allowed_origins="HTTPS://App.example/ null", allowed_hosts="A,b"), "Gpu-7")
    assert made.allowed == {"https://app.example", "null"}
    assert made.hosts >= {"localhost", "gpu-7", "a", "b"}
    assert made.allows("null")
    assert not made.allows(None)


# ---- types of bodies


@pytest.mark.parametrize(
    "path",
    [f"/v1/{name}" for name in ("completions", "chat/completions", "chat/completions/batch", "batches")]
    + ["/tokenize", "/detokenize"],
)
@pytest.mark.parametrize(
    "kind",
    [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "x", "text/json"],
)
async def test_a_body_that_is_not_said_to_be_json(tmp_path: Path, path: str, kind: str | None) -> None:
    async with web_server(data_dir=str(tmp_path)) as server:
        headers = {} if kind is None else {"Content-Type": kind}
        skip = None if kind is not None else ["Content-Type"]
        async with server.http.post(
            server.url + path, data=BODY.encode(), headers=headers, skip_auto_headers=skip
        ) as response:
            assert response.status == 415
            assert "Content-Type: application/json" in checked_error(await response.json())["message"]
        assert not server.scheduler.log


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "APPLICATION/JSON", "application/vnd.x+json"])
async def test_types_of_json(kind: str) -> None:
    async with web_server() as server:
        assert (await ask(server, "POST", "/v1/completions", {"Content-Type": kind}, BODY))[0] == 200


# ---- framing

CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY.encode())


@pytest.mark.parametrize(
    ("version", "lines", "status"),
    [
        ("1.1", ["Transfer-Encoding: chunked"], 200),
        ("1.1", ["Transfer-Encoding: Chunked"], 200),
        ("1.1", ["Transfer-Encoding: gzip, chunked"], 400),
        ("1.1", ["Transfer-Encoding: gzip", "Transfer-Encoding: chunked"], 400),
        ("1.1", ["Transfer-Encoding: chunked", "Transfer-Encoding: chunked"], 400),
        ("1.1", ["Transfer-Encoding: chunked, identity"], 400),
        ("1.0", ["Transfer-Encoding: chunked"], 400),
        ("1.1", ["Transfer-Encoding: chunked", "Content-Encoding: identity", "Content-Encoding: gzip"], 415),
        ("1.1", ["Transfer-Encoding: chunked", "Content-Encoding: identity, gzip"], 415),
        ("1.1", ["Transfer-Encoding: chunked", "Content-Encoding: identity"], 200),
    ],
)
async def test_how_a_body_is_sent(version: str, lines: list[str], status: int) -> None:
    """What a proxy could read another way is refused, and its connection closed."""
    async with web_server() as server:
        reader, writer = await asyncio.open_connection(*server.address)
        head = [f"POST /v1/completions HTTP/{version}", "Host: localhost", "Content-Type: application/json", *lines]
        writer.write("\r\n".join([*head, "Connection: keep-alive", "", ""]).encode() + CHUNKED)
        async with asyncio.timeout(60):
            got = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = int(got.lower().split("content-length: ")[1].split("\r\n")[0])
            answer = json.loads(await reader.readexactly(length))
            assert int(got.split()[1]) == status, answer
            if status != 200:
                checked_error(answer)
            if status == 400:
                assert await reader.read() == b""
        writer.close()


async def test_a_cancellation_with_odd_framing(tmp_path: Path) -> None:
    """Routes that read no body refuse it too."""
    async with web_server(data_dir=str(tmp_path)) as server, aiohttp.ClientSession() as http:
        headers = {"Transfer-Encoding": "gzip, chunked"}
        async with http.post(f"{server.url}/v1/batches/batch_1/cancel", headers=headers) as response:
            assert response.status == 400
