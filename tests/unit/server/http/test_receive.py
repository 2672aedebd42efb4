from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.drivers.until import turns, until
from tests.drivers.web_server import WebServer, checked_error, web_server
from tests.fakes.scheduler import FakeScheduler
from toka_async.openai.parse import bound_parsed_bytes
from toka_async.server.http.receive import RECEIVING, SMALL
from toka_async.server.limits.bodies import Bodies

MIB = 1 << 20
PATH = "/v1/completions"


def padded(size: int, **fields: object) -> bytes:
    """A request of exactly that many bytes."""
    body = json.dumps({"prompt": [1, 2], "max_tokens": 1, **fields}).encode()
    return body + b" " * (size - len(body))


def head(length: int | None, path: str = PATH, form: str = "Content-Type: application/json") -> bytes:
    said = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{form}\r\n{said}\r\n\r\n".encode()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@dataclass
class Client:
    """One connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def status(self) -> int:
        async with asyncio.timeout(60):
            return int((await self.reader.readuntil(b"\r\n")).split()[1])

    async def error(self) -> dict[str, object]:
        """The body of an answer whose first line is read."""
        async with asyncio.timeout(60):
            fields = await self.reader.readuntil(b"\r\n\r\n")
            length = next(int(line.split()[1]) for line in fields.split(b"\r\n") if line.startswith(b"Content-Length"))
            return checked_error(json.loads(await self.reader.readexactly(length)))


@asynccontextmanager
async def connected(server: WebServer, data: bytes = b"", address: str = "127.0.0.1") -> AsyncIterator[Client]:
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), local_addr=(address, 0))
    writer.write(data)
    try:
        yield Client(reader, writer)
    finally:
        writer.transport.abort()


def bodies_of(server: WebServer) -> Bodies:
    return server.app[RECEIVING].bodies


@contextmanager
def room_taken(server: WebServer, *owners: str) -> Iterator[None]:
    """All that those owners may have is taken."""
    bodies = bodies_of(server)
    share = server.app[RECEIVING].most
    rooms = [asyncio.create_task(bodies.reserve(owner, share, 0.0)) for owner in owners]
    try:
        yield
    finally:
        for room in rooms:
            room.result().shrink(0)


async def settled(condition: Callable[[], bool]) -> None:
    """It is so, and still is when everything has had its turn."""
    await until(condition)
    await turns(20)
    assert condition()


async def test_half_bodies_never_wait_for_each_other() -> None:
    """Together they are five times what there is room for; none is whole until all have come half of their way."""
    body = padded(MIB)
    async with web_server(max_body_mb=1, max_bodies_mb=2) as server, AsyncExitStack() as stack:
        bodies, clients = bodies_of(server), []
        for number in range(10):
            connection = connected(server, head(MIB) + body[: MIB // 2], f"127.0.0.{1 + number % 3}")
            clients.append(await stack.enter_async_context(connection))
        await settled(lambda: bodies.num_waiting == 8)
        assert bodies.num_bytes == 2 * MIB
        assert (await server.ok(PATH, {"prompt": "x", "max_tokens": 1}))["usage"]["completion_tokens"] == 1
        for client in clients:
            client.writer.write(body[MIB // 2 :])
        assert [await client.status() for client in clients] == [200] * 10
        assert (bodies.num_bytes, bodies.num_waiting, bodies.num_refused) == (0, 0, 0)


async def test_what_waits_is_not_read() -> None:
    async with web_server(max_body_mb=8, max_bodies_mb=8) as server:
        with room_taken(server, "somebody"):
            async with connected(server, head(8 * MIB) + padded(8 * MIB)) as client:
                await settled(lambda: bodies_of(server).num_waiting == 1)
                assert server.runner.server is not None
                (connection,) = server.runner.server.connections
                waiting = connection._current_request
                assert waiting is not None
                assert waiting.content.total_bytes < MIB
                assert client.writer.transport.get_write_buffer_size() > MIB
        assert b"toka:http_bodies_waiting 0.0" in server.engine.metrics.text()


async def test_who_waits_too_long_gets_a_429_that_names_the_setting() -> None:
    async with web_server(max_body_mb=1, max_bodies_mb=1, receive_timeout=0.1) as server:
        with room_taken(server, "somebody"):
            async with connected(server, head(SMALL + 1) + padded(SMALL + 1)) as client:
                assert await client.status() == 429
                error = await client.error()
                assert error["code"] == "overloaded"
                assert "limits.max_bodies_mb" in str(error["message"])
            for body in (padded(SMALL), padded(100)):  # small ones go on
                assert (await server.post(PATH, body))[0] == 200
            text = server.engine.metrics.text()
            assert b"toka:http_bodies_refused_total 1.0" in text
            assert b"toka:http_body_bytes 1.048576e+06" in text
        assert (await server.post(PATH, padded(MIB)))[0] == 200


async def test_a_request_timeout_bounds_the_wait_too() -> None:
    async with web_server(max_body_mb=1, max_bodies_mb=1, request_timeout=0.1) as server:
        with room_taken(server, "somebody"):
            async with connected(server, head(MIB) + padded(MIB)) as client:
                assert await client.status() == 429


async def test_a_body_in_chunks_has_one_timeout_though_it_is_read_in_two_parts() -> None:
    async with (
        web_server(max_body_mb=1, max_bodies_mb=1, request_timeout=0.4) as server,
        connected(server, head(None)) as client,
    ):
        await asyncio.sleep(0.25)
        client.writer.write(chunk(padded(SMALL + 1)))
        await settled(lambda: bodies_of(server).num_bytes == MIB)
        await asyncio.sleep(0.25)
        client.writer.write(chunk(b""))
        assert await client.status() == 408
        assert "limits.request_timeout is 0.4 s" in str((await client.error())["message"])


async def test_what_it_waits_for_room_is_no_part_of_that() -> None:
    async with (
        web_server(max_body_mb=1, max_bodies_mb=1, request_timeout=1.0) as server,
        connected(server, head(None)) as client,
    ):
        with room_taken(server, "somebody"):
            await asyncio.sleep(0.5)
            client.writer.write(chunk(padded(SMALL + 1)))
            await settled(lambda: bodies_of(server).num_waiting == 1)
            await asyncio.sleep(0.6)  # together longer than either may take
        client.writer.write(chunk(b""))
        assert await client.status() == 200


async def test_a_body_without_a_length_has_room_for_the_largest_until_it_is_there() -> None:
    """But it needs none while it is small. This one waits for its turn in the engine with what it has."""
    size = 2 * SMALL
    async with web_server(FakeScheduler(held=True), max_body_mb=1, max_requests=1, max_waiting=1) as server:
        bodies = bodies_of(server)
        first = asyncio.create_task(server.post(PATH, padded(100)))
        await until(lambda: server.engine.num_requests == 1)
        async with connected(server, head(None) + chunk(padded(size)[:SMALL])) as client:
            await settled(lambda: bodies.num_bytes == 0)
            client.writer.write(chunk(b" " * 10))
            await until(lambda: bodies.num_bytes == MIB)
            client.writer.write(chunk(b" " * (SMALL - 10)) + b"0\r\n\r\n")
            await settled(lambda: bodies.num_bytes == size)
            server.scheduler.step()
            await until(lambda: bodies.num_bytes == 0)  # it is submitted, and not answered
            assert server.engine.num_requests == 1
            server.scheduler.step()
            assert await client.status() == 200
        assert (await first)[0] == 200


async def test_a_body_without_a_length_waits_from_where_it_is_not_small() -> None:
    body = padded(3 * SMALL)
    async with web_server(max_body_mb=1, max_bodies_mb=1) as server:
        bodies = bodies_of(server)
        with room_taken(server, "somebody"):
            async with connected(server, head(None) + chunk(padded(SMALL)) + b"0\r\n\r\n") as small:
                assert await small.status() == 200
            async with connected(server, head(None) + chunk(body[: 2 * SMALL])) as client:
                await settled(lambda: bodies.num_waiting == 1)
                client.writer.write(chunk(body[2 * SMALL :]) + b"0\r\n\r\n")
                await settled(lambda: bodies.num_waiting == 1)
        async with connected(server, head(None) + chunk(body) + b"0\r\n\r\n") as client:
            assert await client.status() == 200
        async with connected(server, head(None) + chunk(b" " * (MIB + 1))) as client:
            assert await client.status() == 413
        assert bodies.num_bytes == 0


async def test_room_is_given_back_when_a_request_is_submitted_refused_or_left() -> None:
    async with web_server(FakeScheduler(held=True), max_body_mb=1) as server:
        bodies = bodies_of(server)
        answer = asyncio.create_task(server.post(PATH, padded(MIB)))
        await until(lambda: server.engine.num_requests == 1)
        assert bodies.num_bytes == 0
        server.scheduler.step()
        assert (await answer)[0] == 200
        assert (await server.post(PATH, padded(MIB, n=0)))[0] == 400
        assert bodies.num_bytes == 0
        async with connected(server, head(MIB) + padded(MIB)[:-1]):
            await until(lambda: bodies.num_bytes == MIB)
        await until(lambda: bodies.num_bytes == 0)
        with room_taken(server, *"abcdefgh"):
            async with connected(server, head(2 * SMALL) + padded(2 * SMALL - 1)):
                await until(lambda: bodies.num_waiting == 1)
            await until(lambda: bodies.num_waiting == 0)


@pytest.mark.parametrize(("size", "room"), [(SMALL // 2, 0), (MIB // 2, None), (3 * MIB, MIB)])
async def test_a_file_needs_what_it_holds_in_memory(tmp_path: Path, size: int, room: int | None) -> None:
    start = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    end = b'\r\n--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x--\r\n'
    length = len(start) + size + len(end)
    async with web_server(data_dir=str(tmp_path), max_body_mb=1) as server:
        bodies = bodies_of(server)
        form = head(length, "/v1/files", "Content-Type: multipart/form-data; boundary=x")
        async with connected(server, form + start + b"y" * size) as client:
            await settled(lambda: bodies.num_bytes == (length if room is None else room))
            client.writer.write(end)
            assert await client.status() == 200
            assert bodies.num_bytes == 0


async def test_what_a_body_becomes_has_room_until_its_request_is_submitted() -> None:
    async with web_server(FakeScheduler(held=True), max_body_mb=1, max_requests=1, max_waiting=1) as server:
        parsed = server.app[RECEIVING].parsed
        first = asyncio.create_task(server.post(PATH, padded(100)))
        await until(lambda: server.engine.num_requests == 1)
        second = asyncio.create_task(server.post(PATH, padded(2 * SMALL)))
        await until(lambda: parsed.num_bytes > 0)
        assert parsed.num_bytes >= 2 * SMALL
        server.scheduler.step()
        await until(lambda: parsed.num_bytes == 0)
        server.scheduler.step()
        assert [status for status, _ in await asyncio.gather(first, second)] == [200, 200]


async def test_without_room_for_what_a_body_becomes_it_gets_a_429() -> None:
    async with web_server(max_body_mb=1, receive_timeout=0.1) as server:
        parsed = server.app[RECEIVING].parsed
        for owner in "ab":
            await parsed.reserve(owner, bound_parsed_bytes(MIB), 0.0)
        async with connected(server, head(SMALL + 1) + padded(SMALL + 1)) as client:
            assert await client.status() == 429
            assert "parsed bodies" in str((await client.error())["message"])
        assert (await server.post(PATH, padded(SMALL)))[0] == 200
        assert parsed.num_refused == 1
        assert bodies_of(server).num_bytes == 0
