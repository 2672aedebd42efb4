from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.drivers.until import until
from tests.drivers.web_server import web_server
from tests.processes.certificates import make_certificate
from toka_async.config import ServerConfig
from toka_async.listening import open_listener
from toka_async.server.http import unsent as module
from toka_async.server.http.acceptor import Acceptor
from toka_async.server.http.connections import create_runner
from toka_async.server.http.tls import tls_context
from toka_async.server.http.unsent import DOWNLOAD, SLICE, UNSENT, FileDownload, Unsent, count_answers
from toka_async.server.limits.free_memory import release_free_memory

MIB = 1 << 20
BODY = bytes(range(256)) * (8 * MIB // 256)  # more than the kernel takes


@asynccontextmanager
async def serving(unsent: Unsent, folder: Path, context: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """The port of an app with one large answer, in memory and in a file."""
    (folder / "file").write_bytes(BODY)

    async def whole(_request: web.Request) -> web.Response:
        return web.Response(body=BODY)

    async def file(_request: web.Request) -> web.StreamResponse:
        return FileDownload(folder / "file", {})

    app = web.Application(middlewares=[count_answers])
    app[UNSENT] = unsent
    app.router.add_get("/whole", whole)
    app.router.add_get("/file", file)
    runner = create_runner(app)
    await runner.setup()
    listener = open_listener(ServerConfig(port=0), 60.0)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)  # what the kernel takes nobody sees
    await Acceptor(runner, listener, 100, 75.0, context).start()
    try:
        yield listener.getsockname()[1]
    finally:
        unsent.check()
        unsent.stop()
        await runner.cleanup()


@contextmanager
def asking(port: int, path: str) -> Any:
    """A client that reads nothing."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", port))
        client.setblocking(False)
        client.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        yield client


async def rest(client: socket.socket) -> bytes:
    """What still comes; less than there is when the connection is cut off."""
    data = bytearray()
    try:
        async with asyncio.timeout(60):
            while more := await asyncio.get_running_loop().sock_recv(client, MIB):
                data += more
    except ConnectionResetError:
        pass
    return bytes(data)


async def test_who_takes_nothing_for_longest_is_cut_off(tmp_path: Path) -> None:
    unsent = Unsent(20 * MIB)
    async with serving(unsent, tmp_path) as port:
        with ExitStack() as stack:
            clients = []
            for number in (1, 2):
                clients.append(stack.enter_context(asking(port, "/whole")))
                await until(lambda expected=number: unsent.num_bytes == expected * len(BODY))  # type: ignore[misc]
            clients.append(stack.enter_context(asking(port, "/whole")))
            await until(lambda: unsent.num_cut == 1)
            assert unsent.num_bytes == 2 * len(BODY)
            first, *others = [await rest(client) for client in clients]
            assert len(first) < len(BODY)
            assert all(each.endswith(BODY) for each in others)
        await until(lambda: unsent.num_bytes == 0)


async def test_who_reads_slowly_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It came first, but takes something; those that came later and take nothing go."""
    monkeypatch.setattr(module, "INTERVAL", 0.01)
    looks, look = list[float](), module.Sending.look

    def looked(self: module.Sending, now: float) -> None:
        looks.append(now)
        look(self, now)

    monkeypatch.setattr(module.Sending, "look", looked)
    unsent = Unsent(20 * MIB)
    async with serving(unsent, tmp_path) as port:
        with asking(port, "/whole") as slow, asking(port, "/whole") as stuck:
            data, loop = bytearray(), asyncio.get_running_loop()
            await until(lambda: unsent.num_bytes == 2 * len(BODY))
            while len(data) < MIB // 4:
                data += await loop.sock_recv(slow, 1 << 16)
                looks.clear()
                await until(lambda: len(looks) >= 2)  # at both
            with asking(port, "/whole"):
                await until(lambda: unsent.num_cut == 1)
            assert (data + await rest(slow)).endswith(BODY)
            assert len(await rest(stuck)) < len(BODY)


async def test_memory_goes_back_to_the_system_after_a_flood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGE", len(BODY) + 1)
    monkeypatch.setattr(module, "INTERVAL", 0.01)
    released: list[int] = []
    unsent = Unsent(MIB, lambda: released.append(unsent.most))
    async with serving(unsent, tmp_path) as port:
        with asking(port, "/whole") as one:
            assert (await rest(one)).endswith(BODY)
        unsent.most = 100 * MIB
        with asking(port, "/whole"), asking(port, "/whole"):
            await until(lambda: unsent.num_bytes == 2 * len(BODY))
        await until(lambda: released)
        assert released == [100 * MIB], "not after the small answer"
    release_free_memory()


async def test_an_answer_larger_than_all_room(tmp_path: Path) -> None:
    """Whoever asks for it gets it."""
    async with serving(Unsent(MIB), tmp_path) as port:
        with asking(port, "/whole") as client:
            assert (await rest(client)).endswith(BODY)


async def test_downloads_count_for_what_is_in_memory(tmp_path: Path) -> None:
    unsent = Unsent(8 * DOWNLOAD)
    async with serving(unsent, tmp_path) as port:
        with ExitStack() as stack:
            clients = []
            for _ in range(9):
                clients.append(stack.enter_context(asking(port, "/file")))
                assert await asyncio.get_running_loop().sock_recv(clients[-1], 1) == b"H"
            assert (unsent.num_bytes, unsent.num_cut) == (8 * DOWNLOAD, 1)
            data = [await rest(client) for client in clients]
            assert [each.endswith(BODY) for each in data] == [False] + [True] * 8
        await until(lambda: unsent.num_bytes == 0)


async def test_an_answer_over_tls_is_not_encrypted_before_it_is_taken(tmp_path: Path) -> None:
    """The transport takes all that it is given, and says nothing of it: so it is given little."""
    certificate, key = make_certificate(tmp_path)
    context = tls_context(ServerConfig(tls_cert=str(certificate), tls_key=str(key)))
    unsent = Unsent(100 * MIB)
    async with serving(unsent, tmp_path, context) as port:
        trusting = ssl.create_default_context(cafile=str(certificate))
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting, limit=1 << 16)
        with closing(writer):
            writer.write(b"GET /whole HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            await until(lambda: unsent.num_bytes == len(BODY))
            (sending,) = unsent._sendings
            await until(lambda: sending.request.protocol.writing_paused)
            assert sending.request.writer.output_size < len(BODY) - SLICE
            assert (await reader.read()).endswith(BODY)
        await until(lambda: unsent.num_bytes == 0)


async def test_a_long_answer_of_the_api() -> None:
    async with web_server() as server:
        tokens = (await server.ok("/tokenize", {"prompt": "x" * 1_000_000}))["tokens"]
        assert len(tokens) == 1_000_000
        async with server.http.head(server.url + "/openapi.json") as response:
            assert int(response.headers["Content-Length"]) > 1 << 14
            assert await response.read() == b""
        assert b"toka:http_unsent_bytes 0.0" in server.engine.metrics.text()
