from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar

import numpy as np
import pytest
import zmq

from tests.drivers.until import turns, until
from tests.processes.cuttable import Cuttable
from toka_async.transport import zmq_frames
from toka_async.transport.zmq_frames import SMALL, Dealer, Frame, Loss, RouterSocket

MAX_FRAME = 1 << 20
WHOSE: ContextVar[str] = ContextVar("whose", default="nobody's")


class Wires:
    """A router, and dealers that say hello to it. heard: what each end got."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.router = RouterSocket(self.context, "tcp://127.0.0.1:*", max_frame=MAX_FRAME, max_queued=9)
        self.heard: list[list[Frame]] = []
        self.lost: list[Loss] = []
        self._dealers: list[Dealer] = []
        self.router.attach(asyncio.get_running_loop(), self.heard.append)

    async def dealer(self, heard: Callable[[list[Frame]], None] = print, url: str = "") -> Dealer:
        made, connected = Dealer(self.context, url or self.router.address), asyncio.Event()
        self._dealers.append(made)
        made.connect(asyncio.get_running_loop(), heard, connected.set, self.lost.append)
        async with asyncio.timeout(60):
            await connected.wait()
        return made

    def close(self) -> None:
        for dealer in self._dealers:
            dealer.close()
        self.router.close()
        self.context.term()


@pytest.fixture
async def wires() -> AsyncIterator[Wires]:
    made = Wires()
    yield made
    made.close()


async def test_frames_go_both_ways(wires: Wires) -> None:
    answers: list[list[Frame]] = []
    dealer = await wires.dealer(answers.append)
    numbers = np.arange(SMALL, dtype=np.int32)
    assert dealer.send([b"head", numbers.data.cast("B"), b""])
    await until(lambda: wires.heard)
    ((identity, head, column, empty),) = wires.heard
    assert (bytes(head), bytes(empty)) == (b"head", b"")
    assert isinstance(column, memoryview), "large frames are not copied"
    assert np.frombuffer(column, np.int32).tolist() == numbers.tolist()
    assert wires.router.send([identity, column])
    await until(lambda: answers)
    assert [bytes(frame) for frame in answers[0]] == [bytes(column)]


async def test_an_empty_frame_goes_back_too(wires: Wires) -> None:
    answers: list[list[Frame]] = []
    dealer = await wires.dealer(answers.append)
    dealer.send([b"hello"])
    await until(lambda: wires.heard)
    for frame in (b"", b"after"):
        assert wires.router.send([wires.heard[0][0], frame])
    await until(lambda: len(answers) == 2)
    assert answers == [[b""], [b"after"]]


async def test_the_router_names_connections_itself_whatever_they_call_themselves(wires: Wires) -> None:
    """A name of the socket's own count, taken by a peer, would end the process once the count comes to it."""
    first = await wires.dealer()
    first.send([b"first"])
    await until(lambda: wires.heard)
    (count,) = struct.unpack(">I", bytes(wires.heard[0][0])[1:])
    sockets = []
    for ahead in range(8):
        socket = wires.context.socket(zmq.DEALER)
        sockets.append(socket)
        socket.linger = 0
        socket.routing_id = struct.pack(">xI", (count + 2 + ahead // 2) % 2**32)  # each of them twice
        socket.connect(wires.router.address)
        socket.send(b"chosen")
        await until(lambda: len(wires.heard) == ahead + 2)  # noqa: B023
    last = await wires.dealer()
    last.send([b"last"])
    await until(lambda: wires.heard[-1][1] == b"last")
    names = [bytes(frames[0]) for frames in wires.heard]
    assert len(set(names)) == len(names) == 10
    for socket in sockets:
        socket.close()


async def test_what_comes_belongs_to_nobody_who_sends(wires: Wires) -> None:
    """What a task logs about, say, is not about a message that is taken because the task has sent something."""
    seen: list[str] = []
    dealer = await wires.dealer(lambda _frames: seen.append(WHOSE.get()))
    dealer.send([b"hello"])
    await until(lambda: wires.heard)
    asyncio.get_running_loop().remove_reader(dealer.socket.fileno())
    wires.router.send([wires.heard[0][0], b"news"])
    WHOSE.set("a task's")
    await until(lambda: dealer.socket.poll(0))
    dealer.send([b"more"])
    await until(lambda: seen)
    assert seen == ["nobody's"]


async def test_messages_that_take_long_let_others_have_their_turn(
    wires: Wires, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_frames, "TURN_SECONDS", 0.0)
    numbers, turns = list[int](), list[int]()

    def take(frames: list[Frame]) -> None:
        numbers.append(int(bytes(frames[1])))
        asyncio.get_running_loop().call_soon(lambda: turns.append(len(numbers)))

    wires.router.attach(asyncio.get_running_loop(), take)
    dealer = await wires.dealer()
    for number in range(6):
        assert dealer.send([b"%d" % number])
    await until(lambda: len(turns) == 6)
    assert numbers == list(range(6))
    assert turns == [1, 2, 3, 4, 5, 6], "one a turn of the loop"


async def test_a_frame_that_is_too_long_ends_its_connection_and_no_other(wires: Wires) -> None:
    good, bad = await wires.dealer(), await wires.dealer()
    bad.send([b"head", bytes(MAX_FRAME + 1)])
    await until(lambda: wires.lost)
    assert good.send([b"hello"])
    await until(lambda: wires.heard)
    assert [bytes(frames[1]) for frames in wires.heard] == [b"hello"]


async def test_a_connection_that_breaks_cuts_no_message_in_two(wires: Wires) -> None:
    """Messages of many frames wait when it breaks: the library looks for news of connections amid them."""
    heard: list[list[Frame]] = []
    server = wires.context.socket(zmq.ROUTER)
    server.linger = 0
    server.bind("tcp://127.0.0.1:*")
    async with Cuttable(server.getsockopt_string(zmq.LAST_ENDPOINT)) as proxy:
        dealer = await wires.dealer(heard.append, proxy.url)
        dealer.send([b"hello"])
        await until(lambda: server.poll(0))
        name, _ = server.recv_multipart()
        asyncio.get_running_loop().remove_reader(dealer.socket.fileno())
        await turns()
        for _ in range(9):
            server.send_multipart([name, *([b"x"] * 97)])
        await until(lambda: dealer.socket.poll(0))
        assert len(dealer.socket.recv_multipart(zmq.NOBLOCK)) == 97
        proxy.cut()
        await until(lambda: wires.lost)
        dealer.drain()
    server.close()
    assert {len(frames) for frames in heard} == {97}


async def test_nobody_is_there(wires: Wires) -> None:
    assert not wires.router.send([b"nobody", b"hello"])
    dealer = await wires.dealer()
    dealer.send([b"hello"])
    await until(lambda: wires.heard)
    dealer.close()
    await until(lambda: not wires.router.send([wires.heard[0][0], b"hello"]))


async def test_one_that_does_not_read_is_not_waited_for(wires: Wires) -> None:
    dealer = await wires.dealer()
    dealer.send([b"hello"])
    await until(lambda: wires.heard)
    asyncio.get_running_loop().remove_reader(dealer.socket.fileno())
    dealer.socket.setsockopt(zmq.RCVHWM, 1)
    sent = 0
    while wires.router.send([wires.heard[0][0], bytes(MAX_FRAME)]):
        sent += 1
        assert sent < 10_000


async def test_an_address_that_is_taken(wires: Wires) -> None:
    with pytest.raises(zmq.ZMQError, match="in use"):
        RouterSocket(wires.context, wires.router.address, max_frame=1, max_queued=1)
