"""Where the addresses of a pool's replicas come from: a list, a file, a DNS name, or a function."""

from __future__ import annotations

import asyncio
import inspect
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

AddressList = Sequence[str]
Addresses = str | Path | AddressList | Callable[[], AddressList | Awaitable[AddressList]]

DNS = "dns"


class AddressSource:
    """Finds the addresses of replicas.

    Args:
        addresses: an address such as tcp://10.0.0.5:10211, or a list of them; dns://NAME:PORT for all addresses that
            the name has; the path of a file with an address a line, where # begins a comment; or a function, async or
            not, that returns a list. A function that is not async runs in a thread.

    Attributes:
        is_fixed: it never changes.

    Raises:
        ValueError: a dns:// address has no name or no port.
    """

    def __init__(self, addresses: Addresses) -> None:
        if isinstance(addresses, str) and "://" not in addresses:
            addresses = Path(addresses)
        self._addresses: Path | AddressList | Callable[[], AddressList | Awaitable[AddressList]]
        self._addresses = [addresses] if isinstance(addresses, str) else addresses
        if isinstance(addresses, str) and addresses.startswith(f"{DNS}://"):
            parts = urlsplit(addresses)
            if not parts.hostname or parts.port is None:
                raise ValueError(f"{addresses}: expected dns://NAME:PORT")
            self._addresses = lambda: resolve(str(parts.hostname), parts.port or 0)
        self.is_fixed = not callable(self._addresses) and not isinstance(self._addresses, Path)

    async def find(self) -> list[str]:
        """Find the addresses now. Raises what the source raises: OSError for files and names."""
        addresses = self._addresses
        if isinstance(addresses, Path):
            found: AddressList = await asyncio.to_thread(read_lines, addresses)
        elif callable(addresses):
            result = await asyncio.to_thread(addresses)
            found = await result if inspect.isawaitable(result) else result
        else:
            found = addresses
        return list(dict.fromkeys(found))


def read_lines(path: Path) -> list[str]:
    """Read a file's lines, without comments and empty ones."""
    lines = (line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line]


async def resolve(name: str, port: int) -> list[str]:
    """Resolve a name to an address of ZeroMQ for each of its own. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    hosts = (str(address[0]) for *_, address in found)
    return sorted({f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}" for host in hosts})
