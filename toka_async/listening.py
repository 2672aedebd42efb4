"""The HTTP listening socket and the limits that many connections need. Knows no HTTP."""

from __future__ import annotations

import errno
import ipaddress
import os
import resource
import socket
import sys
from pathlib import Path

from toka_async.config import ConfigError, LimitsConfig, ServerConfig, ZmqConfig

BACKLOG = 16384  # connections that wait to be accepted
CONNECTIONS = 8192  # at once, that the limits should allow
LONGEST_PROBE = 32767  # seconds that TCP can wait before a probe
DIRECT_CONNECTIONS = 2048  # of ZeroMQ at once
SO_MEMINFO = 55  # socket(7): counts of a socket, in 32 bits each; the last is what it has dropped
_MEMINFO = ("rmem_alloc", "rcvbuf", "wmem_alloc", "sndbuf", "fwd_alloc", "wmem_queued", "optmem", "backlog", "drops")
SPARE_FILES = 256  # descriptors for everything else


def open_listener(server: ServerConfig, client_timeout: float) -> socket.socket:
    """A listening socket at `server.host` and `server.port`. client_timeout: see `notice_the_dead`.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    where = f"{server.host}:{server.port}"
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            server.host, server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError):
        raise ConfigError(f"server.host: cannot resolve {server.host!r}") from None
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port whose connections only linger is free
        notice_the_dead(listener, client_timeout)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        match error.errno:
            case errno.EADDRINUSE:
                raise ConfigError(f"server.port: {where} is in use; choose another, or 0 for a free one") from None
            case errno.EACCES:
                raise ConfigError(f"server.port: no permission to listen on {where}") from None
            case _:
                raise ConfigError(f"server.host: cannot listen on {where}: {error.strerror}") from None
    return listener


def notice_the_dead(listener: socket.socket, timeout: float) -> None:
    """Connections inherit it: one whose other end is gone without a word, or takes nothing, ends after `timeout` s."""
    interval = min(LONGEST_PROBE, max(1, round(timeout / 4)))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, min(LONGEST_PROBE, max(1, round(timeout / 2))))
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, min(2**31 - 1, round(timeout * 1000)))


def max_connections(limits: LimitsConfig, direct: ZmqConfig) -> int:
    """HTTP connections that this process can have at once, with what is spared for everything else."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = 2 * SPARE_FILES + max_direct_connections(direct)
    fitting = 2**31 if soft == resource.RLIM_INFINITY else max(1, soft - taken)
    return fitting if limits.max_connections == "auto" else min(limits.max_connections, fitting)


def max_direct_connections(direct: ZmqConfig) -> int:
    """ZeroMQ connections at once, of which HTTP's are independent: 0 where there is no endpoint for them."""
    if not direct.bind:
        return 0
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    fitting = 2**31 if soft == resource.RLIM_INFINITY else max(1, soft // 4)
    return min(DIRECT_CONNECTIONS if direct.max_connections == "auto" else direct.max_connections, fitting)


def inherited(fd: int) -> socket.socket:
    """The listener that another process has opened and handed on as descriptor `fd`."""
    os.set_inheritable(fd, False)
    listener = socket.socket(fileno=fd)
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    """The URL of a listener; where it listens on every address, one that reaches it from this machine."""
    host, port = listener.getsockname()[:2]
    return url_at(host, port, scheme)


def url_at(host: str, port: int, scheme: str) -> str:
    """The URL of a server that listens there."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def exposed(server: ServerConfig, *, has_keys: bool) -> list[str]:
    """A line for each thing that is missing where others can reach the server."""
    if _is_local(server.host):
        return []
    lines = []
    if not has_keys:
        lines.append(f"whoever can reach {server.host} can use this server: set auth.api_keys or TOKA_API_KEYS")
    if not server.tls_cert:
        lines.append(
            "what is said over HTTP can be read on its way, keys too: set server.tls_cert, or put a proxy before it"
        )
    return lines


def _is_port(port: str) -> bool:
    return port == "*" or (port.isascii() and port.isdecimal() and int(port) < 1 << 16)  # libzmq takes the low 16 bits


def check_direct(direct: ZmqConfig) -> None:
    """Raises ConfigError when `zmq.bind` is no address, or one that others can reach and that has no keys."""
    address = direct.bind
    if not address:
        return
    kind, _, place = address.partition("://")
    host, _, port = place.rpartition(":")
    if (kind, bool(place)) != ("ipc", True) and not (kind == "tcp" and host and _is_port(port)):
        raise ConfigError(f"zmq.bind: expected tcp://HOST:PORT or ipc://PATH, got {address!r}")
    if bool(direct.key) != bool(direct.clients):
        raise ConfigError("zmq.key: needs zmq.clients, and the other way round")
    is_private = not place.startswith("@") if kind == "ipc" else _is_local(host.strip("[]"))
    if not (direct.key or direct.insecure or is_private):
        who = "every user of this machine" if kind == "ipc" else "others"
        instead = ", or give a path without '@', which has permissions" if kind == "ipc" else ""
        raise ConfigError(
            f"zmq.bind: {who} can reach {address}: set zmq.key and zmq.clients (toka-async keys "
            f"makes keys), or zmq.insecure=true{instead}"
        )


def _is_local(host: str) -> bool:
    """Only this machine can reach it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def raise_limits() -> list[str]:
    """Allow this process and its children as many open files as the system lets them.

    Returns:
        A line for each limit that is too low for 8,192 connections at once.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    lines = []
    if hard != resource.RLIM_INFINITY and hard < CONNECTIONS + SPARE_FILES:
        lines.append(f"open files are limited to {hard} (ulimit -Hn): fewer than {CONNECTIONS} connections at once fit")
    return lines


class Delays:
    """Whether connections had to wait because the listener's queue was full. The system counts what it turned away.

    A client whose connection is turned away tries again by itself, after a second and later.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._num_seen = 0
        self._has_spoken = False

    def line(self) -> str | None:
        """Says so once, and what to do; None: nothing new."""
        num_dropped = self._num_dropped()
        is_new, self._num_seen = num_dropped > self._num_seen, num_dropped
        if not is_new or self._has_spoken:
            return None
        self._has_spoken = True
        backlog = _max_backlog()
        queue = f"{min(backlog, BACKLOG)} connections" if backlog is not None else "the system's limit"
        cure = "raise net.core.somaxconn" if backlog is not None and backlog < BACKLOG else "connect fewer at once"
        return f"new connections were delayed: more than {queue} waited to be accepted; {cure}"

    def _num_dropped(self) -> int:
        """Connections that the listener's queue had no room for; 0 where the system does not say."""
        try:
            counts = self._listener.getsockopt(socket.SOL_SOCKET, SO_MEMINFO, len(_MEMINFO) * 4)
        except OSError:
            return 0
        return int.from_bytes(counts[-4:], sys.byteorder) if len(counts) == len(_MEMINFO) * 4 else 0


def _max_backlog() -> int | None:
    """The system's limit of a listening socket's backlog; None where it cannot be read."""
    try:
        return int(Path("/proc/sys/net/core/somaxconn").read_text())
    except (OSError, ValueError):
        return None
