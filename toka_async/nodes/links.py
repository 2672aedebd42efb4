"""The connections between the leader and the agents of the machines: ZeroMQ over TCP with CURVE, watched for breaks.

Each end learns at once when the other one's process dies, and after a while when its machine falls silent.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from toka_async.nodes.messages import ToLeader, ToNode
from toka_async.nodes.secret import VARIABLE
from toka_async.topology import SharedKeys
from toka_async.transport.codec import Codec
from toka_async.transport.life_sockets import admit_holders

logger = logging.getLogger(__name__)

# Seconds after which a silent machine is lost: for the leader where processes that hang are left alone, and for agents
# that the leader has not told a shorter time yet.
SILENT = 60.0
RETRY_MS = 250  # between attempts to connect
HANDSHAKE_MS = 10_000
LAST_WORDS_MS = 1000  # for what was sent to leave when the link is closed
FAILED = 3  # handshakes that fail in a row when the keys are wrong
MOST_BYTES = 1 << 24  # of a message


class LinkRefusedError(Exception):
    """The other end does not accept the keys."""


class NodeLinks:
    """The leader's end.

    Args:
        listen_fd: a socket that listens at `address`.
        hang_timeout: seconds after which a silent machine is lost; 0: SILENT, since it would never be missed otherwise.
    """

    def __init__(self, address: str, listen_fd: int, keys: SharedKeys, hang_timeout: float) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._authenticator = admit_holders(self._context, keys)
        self.socket: zmq.Socket[Any] = self._context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.USE_FD, listen_fd)
        self.socket.curve_server = True
        set_link_options(self.socket, keys, address)
        timeout = hang_timeout or SILENT
        set_heartbeats(self.socket, timeout)
        # Makes agents notice the leader's silence as well.
        self.socket.setsockopt(zmq.HEARTBEAT_TTL, min(6_553_500, max(100, int(timeout * 750))))
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
        self.socket.bind(address)
        self._decoder: Codec[ToLeader] = Codec(ToLeader)
        self._encoder: Codec[ToNode] = Codec(ToNode)
        self._peers: dict[int, bytes] = {}  # by descriptor
        self._has_warned = False

    def send(self, peer: bytes, message: ToNode) -> None:
        """Send, unless the connection has broken."""
        try:
            self.socket.send_multipart([peer, self._encoder.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise

    def receive(self) -> Iterator[tuple[bytes, ToLeader | None]]:
        """Take what has happened: messages with their connection, and breaks (None)."""
        yield from self._take_breaks()
        while True:
            try:
                name, *parts = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            # A descriptor is used again, so breaks of its earlier connection come first.
            yield from self._take_breaks()
            self._peers[int(parts[-1].get(zmq.SRCFD))] = name.bytes
            try:
                message = self._decoder.decode(parts[-1].bytes)
            except msgspec.DecodeError as error:  # of another version, as `Join` may become some day
                logger.warning("a node says what this version does not understand: %s", error)
                continue
            yield name.bytes, message

    def _take_breaks(self) -> Iterator[tuple[bytes, None]]:
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)
            if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                if event["value"] == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
                    self._warn()
            elif (peer := self._peers.pop(event["value"], None)) is not None:
                yield peer, None

    def _warn(self) -> None:
        if not self._has_warned:  # it may be tried again and again
            logger.warning("a node with another key asked to join: %s must be the same on all nodes", VARIABLE)
            self._has_warned = True

    def close(self) -> None:
        """Close when what was sent has left, at most after LAST_WORDS_MS."""
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=LAST_WORDS_MS)
        self._authenticator.stop()
        self._context.term()


class LeaderLink:
    """An agent's end."""

    def __init__(self, context: zmq.Context[Any], address: str, keys: SharedKeys) -> None:
        self.socket: zmq.Socket[Any] = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.RECONNECT_IVL, RETRY_MS)
        self.socket.curve_serverkey = keys.public.encode()
        set_heartbeats(self.socket, SILENT)
        set_link_options(self.socket, keys, address)
        self.monitor = self.socket.get_monitor_socket()
        self.socket.connect(address)
        self._decoder: Codec[ToNode] = Codec(ToNode)
        self._encoder: Codec[ToLeader] = Codec(ToLeader)
        self._num_failed = 0

    def send(self, message: ToLeader) -> None:
        self.socket.send(self._encoder.encode(message))

    def receive(self) -> Iterator[ToNode]:
        """Take the messages that have arrived."""
        while True:
            try:
                data = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield self._decoder.decode(data)

    def take_break(self) -> bool:
        """Tell whether a connection broke. Raises LinkRefusedError."""
        is_broken = False
        while self.monitor.poll(0):
            match recv_monitor_message(self.monitor)["event"]:
                case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._num_failed = 0
                case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                    self._num_failed += 1
                case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                    self._num_failed = FAILED
                case zmq.EVENT_DISCONNECTED:
                    is_broken = True
        if self._num_failed >= FAILED:
            raise LinkRefusedError
        return is_broken and not self._num_failed

    def close(self, linger: int = 0) -> None:
        """Close. linger: milliseconds for what was sent to leave."""
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger)


def set_heartbeats(socket: zmq.Socket[Any], timeout: float) -> None:
    """Have connections break after so many seconds of silence: questions are a quarter apart."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, int(timeout * 250)))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, int(timeout * 750)))


def set_link_options(socket: zmq.Socket[Any], keys: SharedKeys, address: str) -> None:
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.IPV6, int("[" in address))
    socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
