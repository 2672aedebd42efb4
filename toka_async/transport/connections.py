"""Bounds the connections of a listening ZeroMQ socket: their number, and the unread data that they sent.

libzmq bounds neither: it accepts all connections, and keeps all frames of a message until the last one. So connections
are counted by its monitor's events, the kernel tells what arrived over each, and connections over the limit are cut
off. Knows nothing of what messages hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

import zmq

TICK = 0.05  # seconds between two looks at received bytes
PATIENCE = 10.0  # seconds that an unwanted connection may last
TCP_INFO = struct.Struct("128xQ")  # tcpi_bytes_received in Linux's struct tcp_info
EVENT = struct.Struct("=HI")  # libzmq's monitor event: its number, and the descriptor
SHORT = 255  # bytes of the longest frame whose length is one byte
ENCRYPTED = 33  # bytes by which CURVE makes a frame longer
ALLOWED, ALLOWED_EACH_SECOND = 4096, 64  # bytes beside messages: handshake, heartbeats


@dataclass(slots=True)
class Connection:
    """A connection. lent: libzmq's own descriptor, never to be closed here. is_tcp: the kernel can tell what arrived.

    since: when it began. unwanted_since: when it began or was last wanted. taken: bytes of messages that were read.
    pending: bytes that were not, as last seen. is_kept: it is wanted. is_cut: it ends.
    """

    lent: socket.socket
    is_tcp: bool
    since: float
    unwanted_since: float
    taken: int = 0
    pending: int = 0
    is_kept: bool = False
    is_cut: bool = False

    def look(self, now: float) -> None:
        """Update `pending` from the kernel's count of received bytes."""
        with contextlib.suppress(OSError):
            (received,) = TCP_INFO.unpack(self.lent.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO.size))
            allowed = ALLOWED + int(ALLOWED_EACH_SECOND * (now - self.since))
            self.pending = max(0, received - self.taken - allowed)


class Connections:
    """The connections of one socket. Must be made before the socket is bound.

    Args:
        most: connections at once. One more ends the oldest unwanted one, or is ended itself.
        most_bytes: of messages that were not read, unfinished ones included, of all connections together. Above it the
            connection with most is ended, unwanted ones first.
    """

    def __init__(self, router: zmq.Socket[bytes], most: int, most_bytes: int, *, is_encrypted: bool) -> None:
        self._router = router
        self._most = most
        self._most_bytes = most_bytes
        self._overhead = ENCRYPTED if is_encrypted else 0
        self._by_descriptor: dict[int, Connection] = {}
        self._by_name: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}
        self._where: object = None
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._monitor: zmq.Socket[Any] = router.get_monitor_socket(
            zmq.EVENT_ACCEPTED | zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED
        )

    def __len__(self) -> int:
        return len(self._by_descriptor)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start watching, after the socket is bound."""
        address = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        kind, _, where = address.partition("://")
        self._where = int(where.rpartition(":")[2]) if kind == "tcp" else where
        self._loop = loop
        loop.add_reader(self._monitor.fileno(), self._on_events)
        loop.call_soon(self._on_events)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._loop is not None and not self._monitor.closed:
            self._loop.remove_reader(self._monitor.fileno())
        if not self._monitor.closed:
            self._on_events()  # libzmq waits for room for its events
            self._router.disable_monitor()
            self._monitor.close(linger=0)
        for descriptor in list(self._by_descriptor):
            self._forget(descriptor)

    # ---- calls of the socket's owner ---------------------------------------------------------------------------------

    def count_taken(self, parts: Sequence[zmq.Frame]) -> None:
        """Count a message that was read, with its connection's name as the first part."""
        name = parts[0].bytes
        descriptor = self._by_name.get(name)
        if descriptor is None:
            descriptor = self._recognize(name, parts[-1])
        if descriptor is not None:
            self._by_descriptor[descriptor].taken += sum(self._wire_bytes(len(part)) for part in parts[1:])

    def _recognize(self, name: bytes, part: zmq.Frame) -> int | None:
        """Find the descriptor of a connection's first message; None if the connection has ended already."""
        try:
            descriptor = int(part.get(zmq.SRCFD))
        except zmq.ZMQError:
            return None
        if descriptor not in self._by_descriptor:
            self._on_events()
        if descriptor not in self._by_descriptor or descriptor in self._names:
            return None
        self._by_name[name], self._names[descriptor] = descriptor, name
        return descriptor

    def _wire_bytes(self, size: int) -> int:
        size += self._overhead
        return size + (2 if size <= SHORT else 9)

    def keep(self, name: bytes) -> None:
        """Mark the connection as wanted, until it is released."""
        if (descriptor := self._by_name.get(name)) is not None:
            self._by_descriptor[descriptor].is_kept = True

    def release(self, name: bytes) -> None:
        if (descriptor := self._by_name.get(name)) is not None:
            connection = self._by_descriptor[descriptor]
            connection.is_kept, connection.unwanted_since = False, monotonic()

    def cut(self, name: bytes) -> None:
        if (descriptor := self._by_name.get(name)) is not None:
            self._cut(self._by_descriptor[descriptor])

    # ---- events of libzmq --------------------------------------------------------------------------------------------

    def _on_events(self) -> None:
        while not self._monitor.closed:
            try:
                event, descriptor = EVENT.unpack(self._monitor.recv_multipart(zmq.NOBLOCK)[0])
            except zmq.Again:
                return
            if event == zmq.EVENT_ACCEPTED:
                self._accept(descriptor)
            else:
                self._forget(descriptor)

    def _accept(self, descriptor: int) -> None:
        self._forget(descriptor)
        try:
            lent = socket.socket(fileno=descriptor)
        except OSError:  # closed already
            return
        connection = Connection(lent, lent.family != socket.AF_UNIX, now := monotonic(), now)
        if not self._is_ours(lent):  # closed already, and the descriptor was reused
            lent.detach()
            return
        self._by_descriptor[descriptor] = connection
        if len(self._by_descriptor) > self._most:
            self._cut(next((each for each in self._by_descriptor.values() if self._may_go(each)), connection))
        if self._timer is None and self._loop is not None:
            self._timer = self._loop.call_later(TICK, self._look)

    def _forget(self, descriptor: int) -> None:
        connection = self._by_descriptor.pop(descriptor, None)
        if connection is not None:
            connection.lent.detach()
        name = self._names.pop(descriptor, None)
        if name is not None:
            del self._by_name[name]

    # ---- limits ------------------------------------------------------------------------------------------------------

    @staticmethod
    def _may_go(connection: Connection) -> bool:
        return not connection.is_kept and not connection.is_cut

    def _look(self) -> None:
        """Look again and again while there are connections: libzmq does not report arriving bytes."""
        assert self._loop is not None
        now, total = monotonic(), 0
        for each in self._by_descriptor.values():
            if each.is_tcp:
                each.look(now)
            if self._may_go(each) and now - each.unwanted_since > PATIENCE:
                self._cut(each)
            total += 0 if each.is_cut else each.pending
        while total > self._most_bytes:
            rest = [each for each in self._by_descriptor.values() if not each.is_cut]
            most = max(rest, key=lambda each: (not each.is_kept and each.pending > 0, each.pending))
            total -= most.pending
            self._cut(most)
        self._timer = self._loop.call_later(TICK, self._look) if self._by_descriptor else None

    def _is_ours(self, lent: socket.socket) -> bool:
        """Whether the descriptor still is a connection to the socket: libzmq closes it on its own."""
        try:
            where = lent.getsockname()
        except OSError:
            return False
        return bool((where[1] if isinstance(where, tuple) else where) == self._where)

    def _cut(self, connection: Connection) -> None:
        connection.is_cut = True
        if self._is_ours(connection.lent):
            with contextlib.suppress(OSError):
                connection.lent.shutdown(socket.SHUT_RDWR)
