"""Sockets for messages of several frames on an event loop: a router that many connect to, and a dealer that connects.

Frames are received without a copy, so columns are views of what came over the wire. Knows nothing of the frames'
contents.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from time import monotonic
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from toka_async.transport.connections import Connections
from toka_async.transport.curve import KeyPair

Frame = bytes | memoryview
SMALL = 4096  # bytes up to which copying a frame is cheaper than sharing it
TURN_SECONDS = 0.01  # time for messages before other work of the loop gets its turn
RETRIED = 1.0  # seconds within which libzmq reports that it connects again, if it does
FAILED = 3  # failed handshakes in a row that show that the keys are wrong, not the network
EXAMPLE = "an address such as tcp://127.0.0.1:10211"
QUEUED = 4  # unread messages of a connection; it sends no more until they are read


class FrameSocket:
    """A socket on the loop. `attach` comes before anything else."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_frames: Callable[[list[Frame]], None] | None = None
        self._context = copy_context()

    def attach(self, loop: asyncio.AbstractEventLoop, on_frames: Callable[[list[Frame]], None]) -> None:
        """Call `on_frames` with each message.

        The descriptor signals edges, so each wake-up drains to EAGAIN, in turns. Sending drains too, since it may
        swallow an edge.
        """
        self._loop, self._on_frames = loop, on_frames
        loop.add_reader(self.socket.fileno(), self.drain)
        self._drain_soon()

    def drain(self) -> None:
        """Take the messages that have arrived."""
        assert self._loop is not None
        assert self._on_frames is not None
        until = monotonic() + TURN_SECONDS
        while not self.socket.closed:
            try:
                parts = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._note_message(parts)
            self._on_frames([part.bytes if len(part) <= SMALL else part.buffer for part in parts])
            if monotonic() >= until:
                self._drain_soon()
                return

    def _note_message(self, parts: list[zmq.Frame]) -> None:
        """Look at a received message before it is handled."""

    def _drain_soon(self) -> None:
        """Schedule a drain in a context of its own: messages do not belong to the task that happens to send."""
        assert self._loop is not None
        self._loop.call_soon(self.drain, context=self._context)

    def send(self, frames: Sequence[Frame]) -> bool:
        """Send, or return False if the other end has left or takes nothing."""
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except (zmq.Again, zmq.ZMQError) as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            return False
        finally:
            if self._loop is not None and not self.socket.closed:
                self._drain_soon()
        return True

    def close(self, linger: int = 0) -> None:
        """Close. linger: milliseconds for sent messages to leave, while the context lives."""
        if self._loop is not None and not self.socket.closed:
            self._loop.remove_reader(self.socket.fileno())
        self.socket.close(linger=linger)


class RouterSocket(FrameSocket):
    """Binds. Received and sent messages have the connection's name as their first frame.

    A sent message has exactly one more frame: see `_name_connections`.

    Args:
        max_frame: bytes; peers that send a longer frame are disconnected.
        max_queued: messages for a connection that does not read.
        keys: with them, connections are encrypted.
        alive: seconds after which a silent connection is given up.
        most_connections, most_bytes: see `Connections`.

    Raises:
        zmq.ZMQError: the address cannot be bound.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        *,
        max_frame: int,
        max_queued: int,
        keys: KeyPair | None = None,
        alive: float = 30.0,
        most_connections: int = 1 << 20,
        most_bytes: int = 1 << 62,
    ) -> None:
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, max_frame)
        socket.setsockopt(zmq.SNDHWM, max_queued)
        socket.setsockopt(zmq.RCVHWM, QUEUED)
        set_options(socket, address, alive)
        if keys is not None:
            socket.curve_server = True
            socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
        self._connections = Connections(socket, most_connections, most_bytes, is_encrypted=keys is not None)
        try:
            socket.bind(address)
        except zmq.ZMQError:
            self._connections.close()
            socket.close()
            raise
        self._name_connections(socket)
        self._latest: zmq.Frame | None = None
        super().__init__(socket)

    @staticmethod
    def _name_connections(socket: zmq.Socket[bytes]) -> None:
        """Make the socket name all connections itself, whatever name a peer asks for.

        Otherwise a peer could take a name that the socket's own count reaches later, and libzmq (4.3.5) would then end
        the process. There is no option for it. But the listener copied the socket's options when it was bound, so
        connections keep speaking ZMTP while the socket takes them for raw ones, which have no names of their own. The
        only other effect: sent messages have a single frame.
        """
        socket.setsockopt(zmq.ROUTER_RAW, 1)
        socket.setsockopt(zmq.ROUTER_RAW, 0)  # otherwise an empty frame would end its connection

    def attach(self, loop: asyncio.AbstractEventLoop, on_frames: Callable[[list[Frame]], None]) -> None:
        self._connections.attach(loop)
        super().attach(loop, on_frames)

    def _note_message(self, parts: list[zmq.Frame]) -> None:
        self._latest = parts[-1]
        self._connections.count_taken(parts)

    @property
    def address(self) -> str:
        """The address it listens at, with a port of 0 or `*` replaced by the real one."""
        return self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def sender(self) -> str:
        """The public key of the sender of the current message; empty without keys."""
        try:
            return "" if self._latest is None else str(self._latest["User-Id"])
        except zmq.ZMQError:
            return ""

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    def keep(self, name: bytes) -> None:
        """Mark the connection as wanted until it is released: it does not make room for others."""
        self._connections.keep(name)

    def release(self, name: bytes) -> None:
        self._connections.release(name)

    def cut(self, name: bytes) -> None:
        """End a connection, with all messages that wait for it."""
        self._connections.cut(name)

    def close(self, linger: int = 0) -> None:
        self._connections.close()
        super().close(linger)


@dataclass(frozen=True, slots=True)
class Loss:
    """A connection was lost, or cannot be made. problem: why, if known. is_final: no attempt can succeed."""

    problem: str | None = None
    is_final: bool = False


GARBAGE = Loss("the server has sent a frame that is too long, or what is not ZeroMQ's", is_final=True)


class Dealer(FrameSocket):
    """Connects, and reconnects when the connection breaks; messages not sent by then may go over the next connection.

    ZMQ_IMMEDIATE would drop them, but can end the process: when libzmq (4.3.5) sees a break between two frames of a
    message that is being received, its queue is gone, and the rest of the message with it.

    Args:
        keys, server_key: for an encrypted connection.
        max_frame: bytes; a server that sends a longer one is disconnected.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        *,
        keys: KeyPair | None = None,
        server_key: bytes | None = None,
        max_frame: int = -1,
        alive: float = 30.0,
    ) -> None:
        if not isinstance(address, str):  # before there is a socket, which nobody would close
            raise TypeError(f"expected {EXAMPLE}, got {address!r}")
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.MAXMSGSIZE, max_frame)
        socket.setsockopt(zmq.SNDHWM, 0)  # the other end's credit bounds senders
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        set_options(socket, address, alive)
        if keys is not None:
            socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = (
                keys.public,
                keys.secret,
                server_key,
            )
        self._has_keys = keys is not None
        self._is_made = False  # the latest attempt made a connection
        self._num_failed = 0  # failed handshakes in a row
        self._given_up: asyncio.TimerHandle | None = None
        self._monitor = socket.get_monitor_socket()
        self._address = address
        super().__init__(socket)

    def connect(
        self,
        loop: asyncio.AbstractEventLoop,
        on_frames: Callable[[list[Frame]], None],
        on_connected: Callable[[], None],
        on_lost: Callable[[Loss], None],
    ) -> None:
        """Connect; calls `on_connected` for each connection, `on_lost` for each loss.

        Raises ValueError: the address is none.
        """

        def on_event() -> None:
            while not self._monitor.closed:
                try:
                    event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
                except zmq.Again:
                    return
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._num_failed = 0
                    on_connected()
                elif loss := self._find_loss(event):
                    on_lost(loss)
                if event == zmq.EVENT_DISCONNECTED:
                    self._given_up = loop.call_later(RETRIED, on_lost, GARBAGE)
                elif event == zmq.EVENT_CONNECT_RETRIED and self._given_up is not None:
                    self._given_up.cancel()

        self.attach(loop, on_frames)
        loop.add_reader(self._monitor.fileno(), on_event)
        self._on_event = on_event
        loop.call_soon(on_event)
        try:
            self.socket.connect(self._address)
        except zmq.ZMQError as error:  # such as "Invalid argument"
            raise ValueError(f"{zmq.strerror(error.errno or 0)}; expected {EXAMPLE}") from None

    def _find_loss(self, event: int) -> Loss | None:
        """Translate an event of the monitor into the loss that it means, if any."""
        match event:
            case zmq.EVENT_CONNECTED:
                self._is_made = True
            case zmq.EVENT_CONNECT_RETRIED if not self._is_made:
                return Loss("nobody listens there")
            case zmq.EVENT_CONNECT_RETRIED:
                self._is_made = False
            case zmq.EVENT_DISCONNECTED:
                return Loss()
            case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                return Loss("the server does not accept the keys", is_final=True)
            case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL if not self._has_keys:
                return Loss("the server needs keys, or is none for ZeroMQ: give key and server_key", is_final=True)
            case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                return Loss("the server does not accept the keys", is_final=True)
            case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL if self._has_keys:
                self._num_failed += 1
                if self._num_failed >= FAILED:
                    return Loss("server_key is not the key of the server, or the server has no keys")
        return None

    def close(self, linger: int = 0) -> None:
        if self._loop is not None and not self._monitor.closed:
            self._loop.remove_reader(self._monitor.fileno())
        if self._given_up is not None:
            self._given_up.cancel()
        with contextlib.suppress(zmq.ZMQError):
            self.socket.disable_monitor()
        self._monitor.close(linger=0)
        super().close(linger)


def set_options(socket: zmq.Socket[bytes], address: str, alive: float) -> None:
    """Set what both ends share: silent connections are probed, and given up."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, int("[" in address))
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(alive * 1000 / 3))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(alive * 1000))
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(alive * 1000))
