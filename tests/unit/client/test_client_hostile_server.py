from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from tests.cases.wire_messages import WELCOME
from tests.drivers.until import until
from toka_async.client import Client, ConnectionLostError
from toka_async.protocol import Columns, Error, Header, Results, ServerHeader, pack
from toka_async.transport import zmq_frames as multipart

WELCOMED = msgspec.structs.replace(WELCOME, resumed=False, credit=2**63 - 1, window=32)


class Hostile:
    """A server that welcomes its client, and then says what it is told to. num_heard: messages of the client."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._name = b""
        self.url = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.num_heard = 0

    def say(self, *frames: bytes) -> None:
        with contextlib.suppress(zmq.ZMQError):  # the client has gone
            self._socket.send_multipart([self._name, *frames])

    def tell(self, header: ServerHeader, columns: Columns | None = None) -> None:
        self.say(*(bytes(frame) for frame in pack(header, columns)))

    async def hear(self, answer: Callable[[dict[str, Any]], None]) -> None:
        """Calls `answer` with each header of the client."""
        while True:
            await until(lambda: self._socket.poll(0))
            self._name, header, *_ = self._socket.recv_multipart()
            self.num_heard += 1
            answer(msgspec.msgpack.decode(header))


@asynccontextmanager
async def hostile(answers: Callable[[Hostile], None], welcome: Header = WELCOMED) -> AsyncIterator[Hostile]:
    """answers: called for each submission."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.linger = 0
    socket.bind("tcp://127.0.0.1:*")
    server = Hostile(socket)

    def answer(header: dict[str, Any]) -> None:
        if header["type"] == "hello":
            server.say(*(bytes(frame) for frame in pack(welcome)))
        elif header["type"] == "submit":
            answers(server)

    hearing = asyncio.create_task(server.hear(answer))
    try:
        yield server
    finally:
        hearing.cancel()
        socket.close()
        context.term()


def result(**changed: Any) -> tuple[Results, Columns]:
    columns: Columns = {
        "ids": np.asarray([0]),
        **{name: np.asarray([0], np.int32) for name in ("samples", "cached")},
        "counts": np.asarray([2], np.int32),
        "reasons": np.asarray([1], np.int32),
        "token_ids": np.asarray([5, 6], np.int32),
    }
    columns |= {name: np.asarray(values, columns[name].dtype) for name, values in changed.items()}
    return Results(seq=1, columns=tuple(columns)), columns


@pytest.mark.parametrize(
    "changed",
    [
        {"counts": [2**31 - 1]},
        {"counts": [-1]},
        {"samples": [7]},
        {"samples": [-1]},
        {"reasons": [9]},
        {"reasons": [0]},
        {"ids": [0, 0]},
        {"token_ids": []},
    ],
)
async def test_results_that_cannot_be_are_an_error(changed: dict[str, list[int]]) -> None:
    async with hostile(lambda server: server.tell(*result(**changed))) as server, Client(server.url) as client:
        with pytest.raises(ConnectionLostError, match="does not speak the protocol"):
            await client.generate([1], text=False)


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"\x91" * 100_000],
        [b"\xdf\xff\xff\xff\xff"],
        [b"\xc6\xff\xff\xff\xff"],
        [b"\x82\xa4type\xa7results\xa4data\xdd\xff\xff\xff\xff"],
        [b"\x80", b"\x80"],
        [msgspec.msgpack.encode({"type": "results", "seq": 1, "columns": ["ids"], "data": []})],
        [msgspec.msgpack.encode({"type": "welcome", "version": 1})],
    ],
    ids=["empty", "deep", "map", "bin", "array", "frames", "data", "fields"],
)
async def test_a_header_that_is_none_is_an_error(frames: list[bytes]) -> None:
    async with hostile(lambda server: server.say(*frames)) as server, Client(server.url) as client:
        with pytest.raises(ConnectionLostError, match="does not speak the protocol"):
            await client.generate([1], text=False)


async def test_a_frame_that_is_too_long_ends_the_connection_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """libzmq connects no more then: nobody is to wait for what cannot come."""
    monkeypatch.setattr(multipart, "RETRIED", 0.05)
    async with (
        hostile(lambda server: server.say(bytes((1 << 20) + 1))) as server,
        Client(server.url, max_message_mb=1) as client,
    ):
        for _ in range(2):
            with pytest.raises(ConnectionLostError, match="too long"):
                await client.generate([1], text=False)


async def test_a_server_that_wants_everything_at_once_is_not_hurried_after() -> None:
    """A heartbeat of no time, and requests to be tried again after none."""

    def refuse(server: Hostile) -> None:
        header = Error(status=429, code="overloaded", message="again", retry_after=0.0, columns=("ids",))
        server.tell(header, {"ids": np.asarray([0])})

    hasty = msgspec.structs.replace(WELCOMED, heartbeat=1e-9)
    async with hostile(refuse, hasty) as server, Client(server.url) as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.4):
                await client.generate([1], text=False)
        assert 4 <= server.num_heard < 40
