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
CONNECTIONS = 8192  # at once, which the limits should allow
LONGEST_PROBE = 32767  # seconds that TCP can wait before a probe
DIRECT_CONNECTIONS = 2048  # ZeroMQ connections at once
SO_MEMINFO = 55  # socket(7): 32-bit counts of a socket; the last one counts drops
_MEMINFO = ("rmem_alloc", "rcvbuf", "wmem_alloc", "sndbuf", "fwd_alloc", "wmem_queued", "optmem", "backlog", "drops")
SPARE_FILES = 256  # descriptors for everything else


def open_listener(server: ServerConfig, client_timeout: float) -> socket.socket:
    """Open a socket at `server.host` and `server.port`. Raises ConfigError if the address cannot be used."""
    where = f"{server.host}:{server.port}"
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            server.host, server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError):
        raise ConfigError(f"server.host: cannot resolve {server.host!r}") from None
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port with lingering connections only is free
        set_keepalive(listener, client_timeout)
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


def set_keepalive(listener: socket.socket, timeout: float) -> None:
    """End connections, which inherit this, `timeout` seconds after their peer vanished or stopped reading."""
    interval = min(LONGEST_PROBE, max(1, round(timeout / 4)))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, min(LONGEST_PROBE, max(1, round(timeout / 2))))
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, min(2**31 - 1, round(timeout * 1000)))


def max_connections(limits: LimitsConfig, direct: ZmqConfig) -> int:
    """HTTP connections that this process can have at once, beside all other files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = 2 * SPARE_FILES + max_direct_connections(direct)
    fitting = 2**31 if soft == resource.RLIM_INFINITY else max(1, soft - taken)
    return fitting if limits.max_connections == "auto" else min(limits.max_connections, fitting)


def max_direct_connections(direct: ZmqConfig) -> int:
    """ZeroMQ connections at once, beside those of HTTP; 0 without an endpoint."""
    if not direct.bind:
        return 0
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    fitting = 2**31 if soft == resource.RLIM_INFINITY else max(1, soft // 4)
    return min(DIRECT_CONNECTIONS if direct.max_connections == "auto" else direct.max_connections, fitting)


def adopt_listener(fd: int) -> socket.socket:
    """The listener that another process opened and passed on as descriptor `fd`."""
    os.set_inheritable(fd, False)
    listener = socket.socket(fileno=fd)
    listener.setblocking(False)
    return listener


def find_url(listener: socket.socket, scheme: str = "http") -> str:
    """The URL of a listener; one that reaches it from this machine if it listens on every address."""
    host, port = listener.getsockname()[:2]
    return make_url(host, port, scheme)


def make_url(host: str, port: int, scheme: str) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def find_exposures(server: ServerConfig, *, has_keys: bool) -> list[str]:
    """Find the protections that a server lacks which others can reach; a line for each."""
    if _is_local(server.host):
        return []
    lines = []
    if not has_keys:
        lines.append(f"anybody who can reach {server.host} can use this server: set auth.api_keys or TOKA_API_KEYS")
    if not server.tls_cert:
        lines.append("plain HTTP can be read on its way, with API keys: set server.tls_cert, or put a proxy in front")
    return lines


def _is_port(port: str) -> bool:
    return port == "*" or (port.isascii() and port.isdecimal() and int(port) < 1 << 16)  # libzmq takes the low 16 bits


def check_direct(direct: ZmqConfig) -> None:
    """Raise ConfigError if `zmq.bind` is invalid, or if others can reach it and it has no keys."""
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
    """Whether only this machine can reach the host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_admin(server: ServerConfig, *, has_keys: bool) -> None:
    """Raise ConfigError if others can reach the routes that change the model, and there are no keys of admins."""
    if server.admin and not has_keys and not _is_local(server.host):
        raise ConfigError(
            f"server.admin: others can reach {server.host}: set auth.admin_keys or TOKA_ADMIN_KEYS, keys of those who "
            "may change the model"
        )


def raise_limits() -> list[str]:
    """Raise the limit of open files as far as permitted; returns a line if it is too low for 8,192 connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    lines = []
    if hard != resource.RLIM_INFINITY and hard < CONNECTIONS + SPARE_FILES:
        lines.append(f"open files are limited to {hard} (ulimit -Hn): fewer than {CONNECTIONS} connections at once fit")
    return lines


class Delays:
    """Tells when connections waited because the listener's queue was full, by the system's count of rejected ones.

    A client whose connection is rejected tries again by itself, after a second and later.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._num_seen = 0
        self._has_spoken = False

    def take_line(self) -> str | None:
        """Return once a line that tells it, and what to do; otherwise None."""
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
        """Connections for which the listener's queue had no room; 0 where the system does not count."""
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
