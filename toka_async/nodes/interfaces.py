"""The addresses of this machine's network interfaces (Linux)."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

SIOCGIFCONF = 0x8912  # netdevice(7): all IPv4 addresses
IFREQ = struct.Struct("16sH2x4s16x")  # of a 64-bit machine: name, family, port, address
MOST_ADDRESSES = 256
IF_INET6 = Path("/proc/net/if_inet6")


class NetworkError(ValueError):
    """This machine's network does not have what is asked for; the message is one line."""


def find_address(interface: str) -> str:
    """Find an interface's first address. Raises NetworkError."""
    for name, address in list_addresses():
        if name == interface and not ipaddress.ip_address(address).is_link_local:
            return address
    known = ", ".join(sorted({f"{name} ({address})" for name, address in list_addresses()}))
    raise NetworkError(f"{interface!r} is no network interface with an address; this machine has {known}")


def find_interface(address: str) -> str:
    """Find the interface that has an address of this machine. Raises NetworkError."""
    wanted = ipaddress.ip_address(address)
    for name, each in list_addresses():
        if wanted == (own := ipaddress.ip_address(each)) or (wanted.is_loopback and own.is_loopback):
            return name
    raise NetworkError(f"{address} is not an address of this machine")


def find_own_address(host: str, port: int) -> str:
    """Find the address from which this machine reaches `host`, by its routes. Raises NetworkError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connecting sends nothing
        try:
            probe.connect((host, port or 1))
        except OSError as error:
            raise NetworkError(f"there is no route to {host}: {error.strerror}") from None
        return str(probe.getsockname()[0])


def resolve_host(host: str) -> str:
    """Find the address of a name. Raises NetworkError."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except (socket.gaierror, UnicodeError):
        raise NetworkError(f"cannot resolve {host!r}") from None


def list_addresses() -> list[tuple[str, str]]:
    """List interfaces with their addresses, one pair for each address."""
    return [*_list_ipv4(), *_list_ipv6()]


def _list_ipv4() -> list[tuple[str, str]]:
    buffer = array.array("B", bytes(IFREQ.size * MOST_ADDRESSES))
    where, size = buffer.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        answer = fcntl.ioctl(asked.fileno(), SIOCGIFCONF, struct.pack("iP", size, where))
    (filled, _) = struct.unpack("iP", answer)
    found = []
    for name, _, address in IFREQ.iter_unpack(buffer.tobytes()[:filled]):
        label = name.rstrip(b"\0").decode()
        found.append((label.partition(":")[0], socket.inet_ntoa(address)))
    return found


def _list_ipv6() -> list[tuple[str, str]]:
    if not IF_INET6.exists():
        return []
    lines = (line.split() for line in IF_INET6.read_text(encoding="ascii").splitlines())
    return [(line[-1], str(ipaddress.IPv6Address(bytes.fromhex(line[0])))) for line in lines]
