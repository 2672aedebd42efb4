"""The leader's own address: where agents find it, and where its scheduler listens to ranks."""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress

from toka_async.config import ClusterConfig, ConfigError
from toka_async.nodes.interfaces import NetworkError, find_address, find_interface, resolve_host
from toka_async.nodes.placing import parse_address
from toka_async.nodes.secret import read_secret

BACKLOG = 1024
ASK_AGAIN = 1.0  # seconds until a name is looked up again

logger = logging.getLogger(__name__)


def open_leader(cluster: ClusterConfig) -> socket.socket:
    """Open the socket at which agents join. Raises ConfigError."""
    host, port = parse_address(cluster.address, "cluster.address")
    address = find_own(cluster, host)
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


def find_own(
    cluster: ClusterConfig,
    host: str,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Find the leader's address; waits for a name that a name server learns later. Raises ConfigError."""
    deadline, said = clock() + cluster.join_timeout, ""
    while True:
        try:
            return find_on(cluster.interface, host) if cluster.interface else find_named(host)
        except NetworkError as error:
            problem = f"cluster.address={cluster.address}: {error}"
        if cluster.interface or is_address(host) or clock() >= deadline:
            raise ConfigError(problem)
        if problem != said:
            logger.warning("%s; trying again for %g s", problem, cluster.join_timeout)
        said = problem
        sleep(ASK_AGAIN)


def find_named(host: str) -> str:
    """Find the address of a name of this machine. Raises NetworkError."""
    address = resolve_host(host)
    find_interface(address)
    return address


def find_on(interface: str, host: str) -> str:
    """Find the interface's address: that of the name, if it is one of several there. Raises NetworkError."""
    with suppress(NetworkError):
        if find_interface(address := resolve_host(host)) == interface:
            return address
    return find_address(interface)


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def listen(address: str, port: int = 0) -> socket.socket:
    """Open a socket for many connections at an address of this machine. port 0: a free one."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=BACKLOG)
