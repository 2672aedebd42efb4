"""The sockets among the processes of a replica's life: unix sockets, or TCP with CURVE if they are on several machines.

ZeroMQ connects again by itself when a connection breaks, and what was under way is lost. A step must not be missing, so
over TCP a broken connection ends the process. Knows no message types.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import zmq
from zmq.utils.monitor import recv_monitor_message

from toka_async.topology import SharedKeys
from toka_async.transport.codec import Codec
from toka_async.transport.zmq_sockets import ZmqInbox, ZmqOutbox

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator

T = TypeVar("T")
OTHERS_FIRST = 1.0  # seconds for the parent to hear of a process that died before others report that they miss it


class LifeSockets:
    """Makes the sockets of one process.

    Args:
        keys: of the life; without them, the addresses are of unix sockets.
        timeout: seconds after which a silent connection is broken; 0: never.
        on_lost: called in a thread with the message when a connection that this process made breaks.
    """

    def __init__(
        self, context: zmq.Context[Any], keys: SharedKeys | None, timeout: float, on_lost: Callable[[str], object]
    ) -> None:
        self._context = context
        self._keys = keys
        self._timeout = int(timeout * 1000)
        self._on_lost = on_lost
        self._monitors: dict[zmq.Socket[Any], str] = {}
        self._authenticator = None if keys is None else admit_holders(context, keys)

    def listen(self, address: str, codec: Codec[T], listen_fd: int = -1) -> ZmqInbox[T]:
        """Makes an inbox. listen_fd: a socket that listens at the address already; -1: there is none."""

        def prepare(socket: zmq.Socket[Any]) -> None:
            if listen_fd >= 0:
                socket.setsockopt(zmq.USE_FD, listen_fd)
            if self._keys is not None:
                socket.curve_server = True
                self._secure(socket, self._keys, address)

        return ZmqInbox(self._context, address, codec, prepare)

    def connect(self, address: str, codec: Codec[T]) -> ZmqOutbox[T]:
        def prepare(socket: zmq.Socket[Any]) -> None:
            if self._keys is not None:
                socket.curve_serverkey = self._keys.public.encode()
                self._secure(socket, self._keys, address)
                self._monitors[socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)] = address

        return ZmqOutbox(self._context, address, codec, prepare)

    def watch(self) -> None:
        """Begins to watch the connections made so far."""
        if self._monitors:
            threading.Thread(target=self._watch, name="connections", daemon=True).start()

    def _secure(self, socket: zmq.Socket[Any], keys: SharedKeys, address: str) -> None:
        socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
        if self._timeout:
            socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, self._timeout // 4))
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, self._timeout)
        socket.setsockopt(zmq.IPV6, int("[" in address))

    def _watch(self) -> None:
        poller = zmq.Poller()
        for monitor in self._monitors:
            poller.register(monitor, zmq.POLLIN)
        (broken, _), *_ = poller.poll()
        recv_monitor_message(broken)
        time.sleep(OTHERS_FIRST)
        self._on_lost(f"the connection to {self._monitors[broken]} broke")


def admit_holders(context: zmq.Context[Any], keys: SharedKeys) -> ThreadAuthenticator:
    """Makes the context's sockets with CURVE admit only those who have the same keys (ZAP, RFC 27).

    Returns the thread that does so.
    """
    from zmq.auth.thread import ThreadAuthenticator  # which processes of one machine do not need

    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback("*", credentials_provider=KeyHolders(keys))
    return authenticator


class KeyHolders:
    def __init__(self, keys: SharedKeys) -> None:
        self._public = keys.public.encode()

    def callback(self, _domain: str, key: bytes) -> bool:
        """Called by pyzmq with the key of who connects."""
        return key == self._public
