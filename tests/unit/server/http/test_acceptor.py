from __future__ import annotations

import asyncio
import resource
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing

import pytest
from aiohttp import web

from tests.drivers.until import until
from tests.processes.certificates import make_certificate
from toka_async.config import ServerConfig
from toka_async.listening import open_listener
from toka_async.server.engine.metrics import Metrics
from toka_async.server.http import acceptor
from toka_async.server.http.acceptor import BURST, Acceptor
from toka_async.server.http.connections import create_runner
from toka_async.server.http.tls import tls_context

PING = b"GET /ping HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """The server's and a client's."""
    certificate, key = make_certificate(tmp_path_factory.mktemp("tls"))
    context = tls_context(ServerConfig(tls_cert=str(certificate), tls_key=str(key)))
    assert context is not None
    return context, ssl.create_default_context(cafile=str(certificate))


@asynccontextmanager
async def serving(context: ssl.SSLContext | None, most: int) -> AsyncIterator[tuple[int, Acceptor]]:
    """The port of an app that answers /ping."""

    async def ping(_request: web.Request) -> web.Response:
        return web.Response(text="pong")

    app = web.Application()
    app.router.add_get("/ping", ping)
    runner = create_runner(app)
    await runner.setup()
    listener = open_listener(ServerConfig(port=0), 60.0)
    site = Acceptor(runner, listener, most, 75.0, context)
    await site.start()
    assert site.name == f"{'http' if context is None else 'https'}://127.0.0.1:{listener.getsockname()[1]}"
    try:
        yield listener.getsockname()[1], site
    finally:
        await runner.cleanup()


async def ask(port: int, context: ssl.SSLContext, address: str = "127.0.0.1") -> bytes:
    """All that is answered; the request goes out together with the handshake's end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, local_addr=(address, 0))
    with closing(writer):
        writer.write(PING)
        async with asyncio.timeout(60):
            return await reader.read()


async def silent(port: int) -> socket.socket:
    """A connection that says nothing."""
    client = socket.socket()
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
    return client


async def closed(client: socket.socket) -> bytes:
    """What came before the connection was closed, or reset."""
    try:
        async with asyncio.timeout(60):
            return await asyncio.get_running_loop().sock_recv(client, 100)
    except ConnectionResetError:
        return b""


async def test_a_handshake_counts(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    metrics = Metrics()
    async with serving(contexts[0], 3) as (port, site):
        site.show(metrics)
        clients = [await silent(port) for _ in range(8)]
        assert [await closed(client) for client in clients[3:]] == [b""] * 5
        assert b"toka:http_connections 3.0" in metrics.text()
        assert b"toka:http_connections_refused_total 5.0" in metrics.text()
        for client in clients:
            client.close()
        await until(lambda: site.num_open == 0)
        assert (await ask(port, contexts[1])).endswith(b"pong")


async def test_a_connection_that_is_too_many_is_closed_before_its_handshake(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext],
) -> None:
    async with serving(contexts[0], 1) as (port, site):
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=contexts[1])
        with closing(await silent(port)) as client:
            assert await closed(client) == b""
        assert (site.num_open, site.num_refused) == (1, 1)
        writer.close()
        await until(lambda: site.num_open == 0)
        assert (await ask(port, contexts[1])).endswith(b"pong")


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x00\x05hello", b"\xff" * 99])
async def test_a_handshake_that_is_none(contexts: tuple[ssl.SSLContext, ssl.SSLContext], sent: bytes) -> None:
    async with serving(contexts[0], 100) as (port, site):
        with closing(await silent(port)) as client:
            await asyncio.get_running_loop().sock_sendall(client, sent)
            assert b"HTTP" not in await closed(client)
            await until(lambda: site.num_open == 0)
        assert (await ask(port, contexts[1])).endswith(b"pong")


async def test_the_end_cuts_off_who_is_in_a_handshake(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    async with serving(contexts[0], 100) as (port, site):
        client = await silent(port)
        await until(lambda: site.num_open == 1)
    assert site.num_open == 0
    with closing(client):
        assert await closed(client) == b""


async def test_a_burst_is_accepted_in_few_turns() -> None:
    """All connections that wait are accepted before the event loop has turned as often as there are connections."""
    async with serving(None, 10_000) as (port, site):
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(3 * BURST)]
        most = 12
        for _ in range(most):
            await asyncio.sleep(0)
            if site.num_open == len(clients):
                break
        assert site.num_open == len(clients)
        for client in clients:
            client.close()
        await until(lambda: site.num_open == 0)


async def test_a_place_is_free_when_its_connection_has_ended() -> None:
    """A client that asks, closes, and asks again at once is not one too many."""

    def ask_often(port: int) -> list[bytes]:
        answers = []
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(PING.replace(b"Connection: close\r\n", b""))
                answers.append(client.recv(4096)[:15])
        return answers

    async with serving(None, 1) as (port, _):
        answers = await asyncio.get_running_loop().run_in_executor(None, ask_often, port)
        assert answers == [b"HTTP/1.1 200 OK"] * 20


@pytest.mark.parametrize("is_tls", [False, True])
async def test_no_descriptors_are_left(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext],
    is_tls: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whoever waits is accepted when there are some again; the event loop rests until then."""
    monkeypatch.setattr(acceptor, "PAUSE", 0.05)
    async with serving(contexts[0] if is_tls else None, 100) as (port, site):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with closing(socket.socket()) as client:
            client.setblocking(False)
            resource.setrlimit(resource.RLIMIT_NOFILE, (client.fileno() + 1, hard))
            try:
                await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
                await until(lambda: len(caplog.records) >= 2)  # it has failed, and tried again
                assert site.num_open == 0
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            await until(lambda: site.num_open == 1)
        await until(lambda: site.num_open == 0)
