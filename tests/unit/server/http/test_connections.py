from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest

from tests.drivers.until import until
from tests.drivers.web_server import WebServer, web_server
from tests.fakes.scheduler import FakeScheduler
from tests.unit.server.test_app import transports
from toka_async.config import LimitsConfig, ServerConfig, ZmqConfig
from toka_async.listening import max_connections, open_listener

PATH = "/v1/completions"


@contextmanager
def connected(server: WebServer, data: bytes = b"") -> Iterator[socket.socket]:
    """A client's end with a small buffer."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        client.setblocking(False)
        client.sendall(data)
        yield client


def request(body: bytes, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" % PATH.encode()
    return head + b"Content-Length: %d\r\n\r\n" % size + body


async def until_closed(client: socket.socket) -> bytes:
    """What the server has said before it closed, or reset, the connection."""
    data, loop = b"", asyncio.get_running_loop()
    try:
        async with asyncio.timeout(60):
            while more := await loop.sock_recv(client, 65536):
                data += more
    except ConnectionResetError:
        pass
    return data


async def test_a_reader_that_stops_is_cut_off_and_its_request_cancelled() -> None:
    async with web_server(FakeScheduler(held=True), client_timeout=0.2) as server:
        body = {"prompt": "x", "n": 32, "max_tokens": 400, "stream": True, "logprobs": 20, "seed": 1}
        with connected(server, request(json.dumps(body).encode())):
            await until(lambda: server.engine.num_requests == 1)
            (transport,) = transports(server)
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)

            def is_blocked() -> bool:
                server.scheduler.step()
                return transport.get_write_buffer_size() > 0

            await until(is_blocked)
            assert transport.get_write_buffer_size() < 500_000
            await until(lambda: not server.engine.num_requests)
            assert transport.is_closing()
        await until(lambda: not server.engine.busy)
        server.scheduler.step()
        assert not server.scheduler.requests, "cancelled before its 400 tokens"
        assert (await server.get("/health"))[0] == 200


async def test_a_slow_reader_that_reads_is_served() -> None:
    async with web_server(client_timeout=0.2) as server:
        body = json.dumps({"prompt": "x", "n": 8, "max_tokens": 100, "logprobs": 5, "stream": True}).encode()
        with connected(server, request(body)) as client:
            data, loop = b"", asyncio.get_running_loop()
            async with asyncio.timeout(60):
                while b"data: [DONE]" not in data:
                    data += await loop.sock_recv(client, 65536)
                    await asyncio.sleep(0.005)


async def test_a_long_wait_for_the_engine_is_nobodys_fault() -> None:
    async with web_server(FakeScheduler(held=True), client_timeout=0.1) as server:
        answer = asyncio.create_task(server.ok(PATH, {"prompt": "x", "max_tokens": 1}))
        with connected(server, b"POST /v1/compl") as other:
            await until_closed(other)  # which began to say nothing later
        server.scheduler.step()
        assert (await answer)["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("sent", [b"", b"POST /v1/compl"])
async def test_a_client_that_stops_sending_is_cut_off(sent: bytes) -> None:
    """Nothing at all, half a header."""
    async with web_server(client_timeout=0.2) as server:
        with connected(server, sent) as client:
            assert await until_closed(client) == b""
        await until(lambda: not transports(server))


async def test_an_idle_connection_is_closed() -> None:
    async with web_server(client_timeout=0.2) as server:
        with connected(server, b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n") as client:
            assert (await until_closed(client)).startswith(b"HTTP/1.1 200 OK\r\n")


async def test_a_flood_of_connections_leaves_the_first_ones_alone() -> None:
    async with web_server(max_connections=8) as server:
        assert (await server.get("/ping"))[0] == 200  # the client keeps this one
        with ExitStack() as stack:
            clients = [stack.enter_context(connected(server)) for _ in range(100)]
            refused = await asyncio.gather(*map(until_closed, clients[7:]))
            assert all(data.startswith(b"HTTP/1.1 503 ") and b"too many connections" in data for data in refused)
            assert (await server.ok(PATH, {"prompt": "x", "max_tokens": 2}))["usage"]["completion_tokens"] == 2
            assert len(transports(server)) == 8
            text = server.engine.metrics.text()
            assert b"toka:http_connections 8.0" in text
            assert b"toka:http_connections_refused_total 93.0" in text
        await until(lambda: len(transports(server)) == 1)
        with connected(server, b"GET /ping HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n") as client:
            assert (await until_closed(client)).startswith(b"HTTP/1.1 200 OK\r\n")


async def trickle(client: socket.socket, data: bytes, seconds: float) -> None:
    """A byte at a time, until it is closed."""
    for byte in data:
        try:
            await asyncio.get_running_loop().sock_sendall(client, bytes([byte]))
        except OSError:
            return
        await asyncio.sleep(seconds)


@pytest.mark.parametrize("start", [b"", b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n"])
async def test_a_header_that_trickles(start: bytes) -> None:
    """The first of its connection, or a later one."""
    async with web_server(client_timeout=0.2) as server:
        with connected(server, start) as client:
            if start:
                assert (await asyncio.get_running_loop().sock_recv(client, 4096)).startswith(b"HTTP/1.1 200")
            trickling = asyncio.create_task(trickle(client, b"POST /v1/completions HTTP/1.1\r\nX: " + b"x" * 500, 0.02))
            assert await until_closed(client) == b""
            await trickling
        await until(lambda: not transports(server))


def test_the_kernel_notices_ends_that_are_gone() -> None:
    """Half-open connections: the options of the listener are those of what it accepts."""
    with closing(open_listener(ServerConfig(port=0), 40.0)) as listener, socket.socket() as client:
        client.connect(listener.getsockname())
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
            values = [accepted.getsockopt(socket.IPPROTO_TCP, option) for option in options]
            assert values == [20, 10, 2, 40_000]


def test_connections_leave_files_for_everything_else() -> None:
    most = max_connections(LimitsConfig(), ZmqConfig())
    assert max_connections(LimitsConfig(max_connections=3), ZmqConfig()) == 3
    assert max_connections(LimitsConfig(max_connections=2**31 - 1), ZmqConfig()) == min(most, 2**31 - 1)
