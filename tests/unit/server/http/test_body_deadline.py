from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.drivers.until import until
from tests.drivers.web_server import checked_error, web_server
from tests.unit.server.http.test_connections import connected, request, trickle, until_closed
from tests.unit.server.test_app import transports

FORM = (
    b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=x\r\n"
    b'Content-Length: 9000\r\n\r\n--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
)


@pytest.mark.parametrize("start", [request(b"{", length=1000), FORM])
async def test_a_body_that_trickles(tmp_path: Path, start: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with web_server(receive_timeout=0.2, data_dir=str(tmp_path)) as server:
        with connected(server, start) as client:
            trickling = asyncio.create_task(trickle(client, b"x" * 500, 0.02))
            head, _, body = (await until_closed(client)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
            error = checked_error(json.loads(body))
            assert error["code"] == "timeout"
            assert "body came too slowly: limits.receive_timeout is 0.2 s" in error["message"]
            await trickling
        await until(lambda: not transports(server))
        assert list((tmp_path / "uploads").iterdir()) == []
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_who_sends_fast_enough_has_time() -> None:
    """Requests one after the other, a body that takes longer than the timeout but is large, waits in between."""
    async with web_server(receive_timeout=0.2) as server:
        head = request(b"", length=200_000).replace(b"/v1/completions", b"/tokenize")
        with connected(server, head) as client:
            loop = asyncio.get_running_loop()
            for part in (b'{"prompt":"', *[b"x" * 9999] * 20):
                await loop.sock_sendall(client, part)
                await asyncio.sleep(0.02)
            left = 200_000 - 11 - 9999 * 20
            await loop.sock_sendall(client, b"x" * (left - 2) + b'"}')
            assert await loop.sock_recv(client, 12) == b"HTTP/1.1 200"
        with connected(server) as client:
            for _ in range(4):
                await asyncio.sleep(0.1)
                await loop.sock_sendall(client, b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert (await loop.sock_recv(client, 4096)).startswith(b"HTTP/1.1 200")
