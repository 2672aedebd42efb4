"""The leader's own address: where agents find it, and where its scheduler listens to ranks."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket

from toka_async.config import ClusterConfig, ConfigError
from toka_async.nodes.interfaces import NetworkError, find_address, find_interface, resolve_host
from toka_async.nodes.placing import parse_address
from toka_async.nodes.secret import read_secret

BACKLOG = 1024


def open_leader(cluster: ClusterConfig) -> socket.socket:
    """Open the socket at which agents join. Raises ConfigError."""
    host, port = parse_address(cluster.address, "cluster.address")
    try:
        address = find_address(cluster.interface) if cluster.interface else resolve_host(host)
        find_interface(address)
    except NetworkError as error:
        raise ConfigError(f"cluster.address={cluster.address}: {error}") from None
    if ipaddress.ip_address(address).is_loopback and not cluster.interface and host not in (address, "localhost"):
        raise ConfigError(
            f"cluster.address={cluster.address}: {host} is {address} here, which no other machine reaches (see "
            "/etc/hosts): give an address, or cluster.interface"
        )
    read_secret(os.environ, address, insecure=cluster.insecure)
    try:
        return listen(address, port)
    except OSError as error:
        problem = "is in use" if error.errno == errno.EADDRINUSE else error.strerror
        raise ConfigError(f"cluster.address: {address}:{port}: {problem}") from None


def listen(address: str, port: int = 0) -> socket.socket:
    """Open a socket for many connections at an address of this machine. port 0: a free one."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=BACKLOG)
