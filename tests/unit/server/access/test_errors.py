from __future__ import annotations

import asyncio

import pytest

from tests.drivers.web_server import WebServer, checked_error


@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/completions"), ("GET", "/v1/models")])
async def test_an_unknown_expectation(server: WebServer, method: str, path: str) -> None:
    headers = {"Expect": "the-unexpected"}
    async with server.http.request(method, server.url + path, data="{}", headers=headers) as response:
        assert response.status == 417
        checked_error(await response.json())


async def test_an_unknown_route(server: WebServer) -> None:
    status, answer = await server.get("/v2/anything")
    assert status == 404
    message = checked_error(answer)["message"]
    assert message.startswith("no such route: '/v2/anything'; there are /")
    assert "/v1/chat/completions, " in message
    _, answer = await server.get("/v1/chat/completion")
    assert checked_error(answer)["message"].endswith("did you mean /v1/chat/completions?")


async def test_an_unknown_method(server: WebServer) -> None:
    async with server.http.get(server.url + "/v1/completions") as response:
        assert (response.status, response.headers["Allow"]) == (405, "POST")
        assert "only POST" in checked_error(await response.json())["message"]


@pytest.mark.parametrize("raw", [b"GARBAGE\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET /\xff HTTP/1.1\r\nA\r\n\r\n"])
async def test_bad_http(server: WebServer, raw: bytes) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(raw)
    head, body = (await asyncio.wait_for(reader.read(), 60)).split(b"\r\n\r\n")
    writer.close()
    assert head.startswith((b"HTTP/1.0 400 ", b"HTTP/1.1 400 "))
    assert b"application/json" in head
    assert body.startswith(b'{"error":{"message":"bad HTTP: ')


async def test_long_names_are_cut(server: WebServer) -> None:
    error = await server.error("/v1/completions", {"prompt": "x", "y" * 100_000: 1})
    assert len(error["message"]) < 200
    error = await server.error("/v1/completions", {"prompt": "x", "model": "y" * 100_000}, 404)
    assert len(error["message"]) < 400
