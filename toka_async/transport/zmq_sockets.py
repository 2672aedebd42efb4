"""Inboxes and outboxes over ZeroMQ PUSH/PULL, and ways to wait for them: a poll set, or an event loop's reader.

PUSH/PULL, since PUB drops silently; no high-water mark, since the sides bound their own work. Knows no message types
beyond the codec it is given.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Generic, TypeVar

import zmq

from toka_async.transport.codec import Codec

T = TypeVar("T")
TURN_BYTES = 1 << 18  # of messages, roughly, before other work of the event loop gets its turn
TURN_SECONDS = 0.01  # time after which no further part of them is taken
PART_BYTES = 1 << 15
Prepare = Callable[[zmq.Socket[Any]], None]


def _leave(_socket: zmq.Socket[Any]) -> None:
    """A socket of unix sockets needs no further options."""


class ZmqOutbox(Generic[T]):
    """The sending end; connects, so the inbox may be bound before or after. `prepare` gets the socket before that."""

    def __init__(self, context: zmq.Context[Any], address: str, codec: Codec[T], prepare: Prepare = _leave) -> None:
        self._codec = codec
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 1000)
        prepare(self._socket)
        self._socket.connect(address)

    def send(self, message: T) -> None:
        self.send_all([message])

    def send_all(self, messages: Sequence[T]) -> None:
        """Send messages as the frames of one; the inbox takes frame by frame, as if they had come alone."""
        last = len(messages) - 1
        for place, message in enumerate(messages):
            data = self._codec.encode(message)
            self._socket.send(data, zmq.SNDMORE if place < last else 0, copy=len(data) < 65536)

    def close(self) -> None:
        self._socket.close()

    def drop(self) -> None:
        """Close; messages that have not arrived are lost, also for later listeners at the address."""
        self._socket.close(linger=0)


class ZmqInbox(Generic[T]):
    """The receiving end; binds. Raises zmq.ZMQError if the address cannot be bound.

    prepare: gets the socket before it is bound.
    """

    def __init__(self, context: zmq.Context[Any], address: str, codec: Codec[T], prepare: Prepare = _leave) -> None:
        self._codec = codec
        self._further: asyncio.Handle | None = None
        self._is_attached = False
        self.socket = context.socket(zmq.PULL)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.LINGER, 0)
        prepare(self.socket)
        try:
            self.socket.bind(address)
        except zmq.ZMQError:
            self.socket.close()
            raise

    def drain(self) -> list[T]:
        return self._take()[0]

    def _take(self, most_bytes: float = math.inf) -> tuple[list[T], int, bool]:
        """Take messages of about `most_bytes`; returns them, their bytes, and whether these are all that are there."""
        messages: list[T] = []
        num_bytes = 0
        while num_bytes < most_bytes:
            try:
                frame = self.socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return messages, num_bytes, True
            messages.append(self._codec.decode(frame.buffer))
            num_bytes += len(frame.buffer)
        return messages, num_bytes, False

    def wait(self, seconds: float) -> bool:
        """Waits until a message has arrived, so long at most. Returns whether one has."""
        return bool(self.socket.poll(round(1000 * seconds)))

    def receive(self) -> T:
        return self._codec.decode(self.socket.recv(copy=False).buffer)

    def attach(self, loop: asyncio.AbstractEventLoop, callback: Callable[[list[T]], None]) -> None:
        """Call `callback` with the messages whenever some arrive.

        The socket's descriptor signals edges, so each wake-up drains to EAGAIN, in as many turns of the loop as that
        takes; a first drain is scheduled for messages that came before. Far cheaper per message than zmq.asyncio
        (measured).
        """

        def on_readable() -> None:
            if self._further is not None:
                self._further.cancel()
            self._further = loop.call_soon(on_readable)  # ahead of the woken tasks: they get more at once
            left, until = TURN_BYTES, monotonic() + TURN_SECONDS
            while self._is_attached:
                messages, num_bytes, is_all = self._take(min(left, PART_BYTES))
                left -= num_bytes
                if is_all:
                    self._further.cancel()
                if messages:
                    callback(messages)
                if is_all or left <= 0 or monotonic() >= until:
                    break

        self._is_attached = True
        loop.add_reader(self.socket.getsockopt(zmq.FD), on_readable)
        self._further = loop.call_soon(on_readable)

    def detach(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_attached = False
        if self._further is not None:
            self._further.cancel()
        loop.remove_reader(self.socket.getsockopt(zmq.FD))

    def close(self) -> None:
        self.socket.close()


class PollSet:
    def __init__(self, inboxes: Sequence[ZmqInbox[Any]]) -> None:
        self._poller = zmq.Poller()
        for inbox in inboxes:
            self._poller.register(inbox.socket, zmq.POLLIN)

    def wait(self, timeout: float | None = None) -> bool:
        """True when a message is there; False after `timeout` seconds (None: wait for ever)."""
        return bool(self._poller.poll(None if timeout is None else int(timeout * 1000)))
