from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import numpy as np
import pytest
import zmq

from tests.drivers.until import turns
from toka_async.arrays import as_i32, column
from toka_async.messages import Cancels, DropStop, ToScheduler
from toka_async.transport import zmq_sockets
from toka_async.transport.codec import Codec
from toka_async.transport.zmq_sockets import PollSet, ZmqInbox, ZmqOutbox

S = TypeVar("S", ZmqOutbox[ToScheduler], ZmqInbox[ToScheduler])


@pytest.fixture
def address() -> Iterator[str]:
    """A short path: those of pytest can be longer than a unix socket's name may be."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield f"ipc://{Path(folder) / 'inbox'}"


class Wires:
    """Makes sockets of one context and closes them."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._context: zmq.Context[Any] = zmq.Context()
        self._stack = ExitStack()
        self._stack.callback(self._context.term)

    def outbox(self, address: str | None = None) -> ZmqOutbox[ToScheduler]:
        return self._kept(ZmqOutbox(self._context, address or self.address, Codec(ToScheduler)))

    def inbox(self, address: str | None = None) -> ZmqInbox[ToScheduler]:
        return self._kept(ZmqInbox(self._context, address or self.address, Codec(ToScheduler)))

    def _kept(self, socket: S) -> S:
        self._stack.callback(socket.close)
        return socket

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def wires(address: str) -> Iterator[Wires]:
    """Sockets at a fresh address."""
    made = Wires(address)
    yield made
    made.close()


@pytest.fixture
def inbox(wires: Wires) -> ZmqInbox[ToScheduler]:
    return wires.inbox()


def drained(inbox: ZmqInbox[ToScheduler], count: int) -> list[ToScheduler]:
    """Drains until `count` messages have come."""
    poll, messages = PollSet([inbox]), list[ToScheduler]()
    while len(messages) < count:
        assert poll.wait(60), f"{len(messages)} messages of {count}"
        messages += inbox.drain()
    return messages


def number(message: ToScheduler) -> int:
    assert isinstance(message, DropStop)
    return message.stop_id


def test_messages_arrive_in_order(wires: Wires, inbox: ZmqInbox[ToScheduler]) -> None:
    sender = wires.outbox()
    for i in range(5000):
        sender.send(DropStop(stop_id=i))
    assert [number(message) for message in drained(inbox, 5000)] == list(range(5000))
    assert inbox.drain() == []


def test_messages_sent_together_arrive_as_if_alone(wires: Wires, inbox: ZmqInbox[ToScheduler]) -> None:
    sender = wires.outbox()
    sender.send_all([])
    sender.send_all([DropStop(stop_id=i) for i in range(3)])
    sender.send(DropStop(stop_id=3))
    sender.send_all([Cancels(request_ids=column(np.arange(20_000 * i, dtype=np.int32))) for i in range(4)])
    messages = drained(inbox, 8)
    assert [number(message) for message in messages[:4]] == [0, 1, 2, 3]
    assert [len(as_i32(each.request_ids)) for each in messages[4:] if isinstance(each, Cancels)] == [
        0,
        20000,
        40000,
        60000,
    ]


def test_messages_sent_before_the_inbox_is_bound_arrive(wires: Wires) -> None:
    sender = wires.outbox()
    for i in range(3):
        sender.send(DropStop(stop_id=i))
    inbox = wires.inbox()
    assert [number(message) for message in drained(inbox, 3)] == [0, 1, 2]


def test_what_a_dropped_outbox_had_not_sent_reaches_nobody(wires: Wires) -> None:
    kept, context = wires.outbox(), zmq.Context[Any]()
    codec: Codec[ToScheduler] = Codec(ToScheduler)
    lost = ZmqOutbox(context, wires.address, codec, lambda socket: socket.setsockopt(zmq.LINGER, -1))
    lost.send(DropStop(stop_id=1))
    lost.drop()
    ending = Thread(target=context.term, daemon=True)  # ends when a thread of the library's has closed the socket
    ending.start()
    ending.join(10)
    assert not ending.is_alive(), "the message is still to be sent"
    kept.send(DropStop(stop_id=2))
    inbox = wires.inbox()
    assert drained(inbox, 1) == [DropStop(stop_id=2)]
    kept.send(DropStop(stop_id=3))
    assert drained(inbox, 1) == [DropStop(stop_id=3)]


def test_every_senders_messages_arrive(wires: Wires, inbox: ZmqInbox[ToScheduler]) -> None:
    senders = [wires.outbox() for _ in range(3)]
    for i in range(300):
        senders[i % 3].send(DropStop(stop_id=i))
    numbers = [number(message) for message in drained(inbox, 300)]
    assert sorted(numbers) == list(range(300))
    for k in range(3):
        own = [i for i in numbers if i % 3 == k]
        assert own == sorted(own)


@pytest.mark.parametrize("num_tokens", [1, 16_383, 16_384, 2_000_000])
def test_a_large_message_arrives_whole(wires: Wires, inbox: ZmqInbox[ToScheduler], num_tokens: int) -> None:
    sender, prompt = wires.outbox(), np.arange(num_tokens, dtype=np.int32)
    sender.send(Cancels(request_ids=column(prompt)))
    sender.send(DropStop(stop_id=1))
    prompt[:] = -1  # a message is what it was when it was sent
    first, second = drained(inbox, 2)
    assert isinstance(first, Cancels)
    assert np.array_equal(as_i32(first.request_ids), np.arange(num_tokens))
    assert second == DropStop(stop_id=1)


def test_receive_waits_for_the_next_message(wires: Wires, inbox: ZmqInbox[ToScheduler]) -> None:
    sender = wires.outbox()
    sender.send(DropStop(stop_id=1))
    sender.send(DropStop(stop_id=2))
    assert inbox.receive() == DropStop(stop_id=1)
    assert inbox.receive() == DropStop(stop_id=2)


def test_a_message_may_be_waited_for(wires: Wires, inbox: ZmqInbox[ToScheduler]) -> None:
    assert not inbox.wait(0.01)
    wires.outbox().send(DropStop(stop_id=1))
    assert inbox.wait(60)
    assert inbox.receive() == DropStop(stop_id=1)


def test_messages_outlive_the_sockets_they_came_by(wires: Wires, inbox: ZmqInbox[ToScheduler]) -> None:
    sender, prompt = wires.outbox(), np.arange(50_000, dtype=np.int32)
    sender.send(Cancels(request_ids=column(prompt)))
    (message,) = drained(inbox, 1)
    inbox.close()
    sender.close()
    assert isinstance(message, Cancels)
    assert np.array_equal(as_i32(message.request_ids), prompt)


def test_an_address_that_cannot_be_bound_is_an_error(wires: Wires) -> None:
    with pytest.raises(zmq.ZMQError):
        wires.inbox("ipc:///nonexistent-folder/inbox")


# ---- waiting


def test_wait_ends_with_its_timeout(inbox: ZmqInbox[ToScheduler]) -> None:
    poll = PollSet([inbox])
    assert not poll.wait(0.01)
    assert not poll.wait(0.0)


def test_wait_ends_with_a_message_in_any_inbox(wires: Wires, inbox: ZmqInbox[ToScheduler]) -> None:
    other = wires.inbox(f"{wires.address}-2")
    poll = PollSet([inbox, other])
    wires.outbox(f"{wires.address}-2").send(DropStop(stop_id=7))
    assert poll.wait(60)
    assert inbox.drain() == []
    assert other.drain() == [DropStop(stop_id=7)]
    wires.outbox().send(DropStop(stop_id=1))
    assert poll.wait(None)
    assert inbox.drain() == [DropStop(stop_id=1)]


# ---- on an event loop


class Arrivals:
    """Messages called back, and a way to wait for as many as expected."""

    def __init__(self) -> None:
        self.messages: list[ToScheduler] = []
        self.num_calls = 0
        self._event = asyncio.Event()

    def __call__(self, messages: list[ToScheduler]) -> None:
        self.messages += messages
        self.num_calls += 1
        self._event.set()

    async def wait(self, count: int) -> list[int]:
        async with asyncio.timeout(60):
            while len(self.messages) < count:
                self._event.clear()
                await self._event.wait()
        return [number(message) for message in self.messages]


async def test_messages_from_before_attach_are_called_back(wires: Wires, inbox: ZmqInbox[ToScheduler]) -> None:
    sender, arrivals, loop = wires.outbox(), Arrivals(), asyncio.get_running_loop()
    for i in range(3):
        sender.send(DropStop(stop_id=i))
    assert PollSet([inbox]).wait(60)
    inbox.attach(loop, arrivals)
    assert await arrivals.wait(3) == [0, 1, 2]
    inbox.detach(loop)


async def test_messages_are_called_back_as_they_come_in_order(wires: Wires, inbox: ZmqInbox[ToScheduler]) -> None:
    sender, arrivals, loop = wires.outbox(), Arrivals(), asyncio.get_running_loop()
    inbox.attach(loop, arrivals)
    for i in range(2000):
        sender.send(DropStop(stop_id=i))
        if i % 100 == 0:
            await asyncio.sleep(0)
    assert await arrivals.wait(2000) == list(range(2000))
    assert arrivals.num_calls < 2000  # a wake-up takes all that is there
    sender.send(DropStop(stop_id=2000))
    assert (await arrivals.wait(2001))[-1] == 2000
    inbox.detach(loop)


@pytest.mark.parametrize("limits", [{"TURN_BYTES": 1}, {"TURN_SECONDS": 0.0, "PART_BYTES": 1}])
async def test_others_have_their_turns_between_many_messages(
    wires: Wires, inbox: ZmqInbox[ToScheduler], monkeypatch: pytest.MonkeyPatch, limits: dict[str, float]
) -> None:
    """However many are there; after a detach the rest stays where it is."""
    for name, limit in limits.items():
        monkeypatch.setattr(zmq_sockets, name, limit)
    sender, arrivals, loop = wires.outbox(), Arrivals(), asyncio.get_running_loop()
    for i in range(10):
        sender.send(DropStop(stop_id=i))
    assert PollSet([inbox]).wait(60)
    inbox.attach(loop, arrivals)
    assert await arrivals.wait(5) == list(range(arrivals.num_calls))
    inbox.detach(loop)
    num_calls = arrivals.num_calls
    await turns()
    assert arrivals.num_calls == num_calls < 10
    rest = drained(inbox, 10 - num_calls)
    assert arrivals.messages + rest == [DropStop(stop_id=i) for i in range(10)]


async def test_nothing_is_called_back_without_messages_or_after_detach(
    wires: Wires, inbox: ZmqInbox[ToScheduler]
) -> None:
    sender, arrivals, loop = wires.outbox(), Arrivals(), asyncio.get_running_loop()
    inbox.attach(loop, arrivals)
    await turns()
    assert arrivals.num_calls == 0
    inbox.detach(loop)
    sender.send(DropStop(stop_id=1))
    assert PollSet([inbox]).wait(60)
    await turns()
    assert arrivals.messages == []
    assert drained(inbox, 1) == [DropStop(stop_id=1)]


async def test_a_callback_may_send_to_its_own_inbox(wires: Wires, inbox: ZmqInbox[ToScheduler]) -> None:
    """Sending and receiving share the socket's signals; none may be lost between them."""
    sender, loop = wires.outbox(), asyncio.get_running_loop()
    arrivals = Arrivals()

    def echo(messages: list[ToScheduler]) -> None:
        for message in messages:
            if number(message) < 200:
                sender.send(DropStop(stop_id=number(message) + 1))
        arrivals(messages)

    callback: Callable[[list[ToScheduler]], None] = echo
    inbox.attach(loop, callback)
    sender.send(DropStop(stop_id=0))
    assert await arrivals.wait(201) == list(range(201))
    inbox.detach(loop)
