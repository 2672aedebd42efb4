from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq

from tests.drivers.until import until
from toka_async.transport import connections
from toka_async.transport.curve import Gate, KeyPair, make_keys, read_pair, read_public
from toka_async.transport.zmq_frames import Dealer, Frame, RouterSocket

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER" + b"\x08Identity" + bytes(4)
MORE = b"\x03" + struct.pack(">Q", 1 << 16) + bytes(1 << 16)  # a frame of a message that goes on


class Endpoint:
    """A router with limits. heard: what it got, with the connections' names."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, most: int, most_bytes: int, keys: KeyPair | None
    ) -> None:
        self.router = RouterSocket(
            context, address, max_frame=1 << 20, max_queued=9, keys=keys, most_connections=most, most_bytes=most_bytes
        )
        self.heard: list[list[Frame]] = []
        self.router.attach(asyncio.get_running_loop(), self.heard.append)

    @property
    def port(self) -> int:
        return int(self.router.address.rpartition(":")[2])


@asynccontextmanager
async def endpoint(
    most: int = 100, most_bytes: int = 1 << 30, address: str = "tcp://127.0.0.1:*", folder: Path | None = None
) -> AsyncIterator[Endpoint]:
    """folder: of keys, with which connections are encrypted."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    gate = None if folder is None else Gate(context, folder / "clients")
    keys = None if folder is None else read_pair(folder / "server.key_secret")
    made = Endpoint(context, address, most, most_bytes, keys)
    try:
        yield made
    finally:
        made.router.close()
        if gate is not None:
            gate.close()
        await asyncio.get_running_loop().run_in_executor(None, context.term)


@asynccontextmanager
async def client(url: str, folder: Path | None = None) -> AsyncIterator[Dealer]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    keys = None if folder is None else read_pair(folder / "clients" / "ours.key_secret")
    server_key = None if folder is None else read_public(folder / "server.key")
    dealer, connected = Dealer(context, url, keys=keys, server_key=server_key), asyncio.Event()
    dealer.connect(asyncio.get_running_loop(), lambda _: None, connected.set, lambda _: None)
    async with asyncio.timeout(60):
        await connected.wait()
    try:
        yield dealer
    finally:
        dealer.close()
        await asyncio.get_running_loop().run_in_executor(None, context.term)


async def ended(stranger: socket.socket) -> None:
    """Waits for the other end to end the connection."""
    stranger.setblocking(False)
    async with asyncio.timeout(60):
        with contextlib.suppress(ConnectionError):
            while await asyncio.get_running_loop().sock_recv(stranger, 4096):
                pass


@asynccontextmanager
async def flood(stranger: socket.socket) -> AsyncIterator[None]:
    """Sends without end. What it sees of its end is its system's: an error, or a window that stays closed."""

    async def send() -> None:
        while True:
            await asyncio.get_running_loop().sock_sendall(stranger, MORE)

    stranger.setblocking(False)
    task = asyncio.create_task(send())
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is."""
    monkeypatch.setattr(connections, "PATIENCE", 1e9)


async def test_one_too_many_ends_the_oldest_that_nobody_wants() -> None:
    async with endpoint(most=3) as ours, client(ours.router.address) as good:
        good.send([b"hello"])
        await until(lambda: ours.heard)
        ours.router.keep(bytes(ours.heard[0][0]))
        with contextlib.ExitStack() as stack:
            where = ("127.0.0.1", ours.port)
            strangers = [stack.enter_context(socket.create_connection(where)) for _ in range(5)]
            for stranger in strangers[:3]:
                await ended(stranger)
            good.send([b"again"])
            await until(lambda: len(ours.heard) == 2)
            await until(lambda: ours.router.num_connections == 3)


async def test_where_all_are_wanted_the_newest_is_ended() -> None:
    async with endpoint(most=1) as ours, client(ours.router.address) as good:
        good.send([b"hello"])
        await until(lambda: ours.heard)
        ours.router.keep(bytes(ours.heard[0][0]))
        with socket.create_connection(("127.0.0.1", ours.port)) as stranger:
            await ended(stranger)
        ours.router.release(bytes(ours.heard[0][0]))
        async with client(ours.router.address) as other:
            other.send([b"hello"])
            await until(lambda: len(ours.heard) == 2)


async def test_who_is_not_wanted_is_ended_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "PATIENCE", 0.0)
    async with endpoint() as ours:
        with socket.create_connection(("127.0.0.1", ours.port)) as stranger:
            await ended(stranger)
        await until(lambda: not ours.router.num_connections)


async def test_a_message_without_an_end_takes_no_more_memory_than_is_allowed() -> None:
    async with endpoint(most_bytes=1 << 20) as ours, client(ours.router.address) as good:
        with socket.create_connection(("127.0.0.1", ours.port)) as stranger:
            stranger.sendall(GREETING)
            await asyncio.to_thread(stranger.recv, 64, socket.MSG_WAITALL)
            stranger.sendall(b"\x04" + bytes([len(READY)]) + READY)
            await until(lambda: ours.router.num_connections == 2)
            async with flood(stranger):
                await until(lambda: ours.router.num_connections == 1)
        good.send([b"hello"])
        await until(lambda: ours.heard)
        assert [bytes(frames[1]) for frames in ours.heard] == [b"hello"]


@pytest.mark.parametrize("is_encrypted", [False, True])
async def test_much_in_messages_that_are_taken_is_no_reason_to_end_a_connection(
    tmp_path: Path, is_encrypted: bool
) -> None:
    """What is counted as taken is what came over the wire: nothing of it is left in the sum."""
    make_keys(tmp_path, "server")
    make_keys(tmp_path / "clients", "ours")
    folder = tmp_path if is_encrypted else None
    async with endpoint(most_bytes=1 << 20, folder=folder) as ours, client(ours.router.address, folder) as good:
        for _ in range(32):
            for _ in range(64):
                good.send([b"", bytes(200), bytes(230), bytes(300), bytes(3000)])
            good.send([bytes(1 << 18)])
            before = len(ours.heard)
            await until(lambda: len(ours.heard) == before + 65)  # noqa: B023
        (connection,) = ours.router._connections._by_descriptor.values()
        connection.look(connection.since)
        assert connection.taken > 4 << 20
        assert connection.pending == 0
        assert not connection.is_cut


async def test_who_has_sent_most_is_ended_first() -> None:
    async with endpoint(most_bytes=1 << 20) as ours:
        where = ("127.0.0.1", ours.port)
        with socket.create_connection(where) as small, socket.create_connection(where) as large:
            for stranger in (small, large):
                stranger.sendall(GREETING)
                await asyncio.to_thread(stranger.recv, 64, socket.MSG_WAITALL)
                stranger.sendall(b"\x04" + bytes([len(READY)]) + READY)
            small.sendall(MORE)
            await until(lambda: ours.router.num_connections == 2)
            async with flood(large):
                await until(lambda: ours.router.num_connections == 1)
            small.setblocking(False)
            assert small.recv(4096)  # the rest of the handshake, after which it stays open
            with pytest.raises(BlockingIOError):
                small.recv(4096)


async def test_connections_in_the_file_system_are_counted_too(tmp_path: Path) -> None:
    async with endpoint(most=2, address=f"ipc://{tmp_path}/socket") as ours, client(ours.router.address) as good:
        good.send([b"hello"])
        await until(lambda: ours.heard)
        ours.router.keep(bytes(ours.heard[0][0]))
        with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as second:
            for stranger in (first, second):
                stranger.connect(f"{tmp_path}/socket")
            await ended(first)
            await until(lambda: ours.router.num_connections == 2)


async def test_a_connection_can_be_ended() -> None:
    async with endpoint() as ours, client(ours.router.address) as good:
        good.send([b"hello"])
        await until(lambda: ours.heard)
        ours.router.cut(bytes(ours.heard[0][0]))
        await until(lambda: not ours.router.send([ours.heard[0][0], b"anybody?"]))
        good.send([b"again"])
        await until(lambda: len(ours.heard) == 2)
        assert ours.heard[1][0] != ours.heard[0][0]
