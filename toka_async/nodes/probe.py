"""Tests whether machines reach each other: each listens, and names itself to whoever connects.

The name matters: private addresses, such as those of container bridges, can be another machine's as well.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from toka_async.nodes.leading import listen
from toka_async.nodes.messages import Neighbour

TIMEOUT = 10.0  # seconds for an answer


class ProbeListener:
    """Listens at an address of this machine, and answers in a thread. name: unique among all machines."""

    def __init__(self, address: str, name: str) -> None:
        self._socket = listen(address)
        self._name = name.encode()
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._answer, name="probes", daemon=True).start()

    def close(self) -> None:
        self._socket.close()

    def _answer(self) -> None:
        with suppress(OSError):  # closed
            while True:
                connection, _ = self._socket.accept()
                with connection, suppress(OSError):
                    connection.sendall(self._name)


def make_name(leader: str, index: int) -> str:
    return f"toka-async {leader} node {index}"


def probe_all(neighbours: Sequence[Neighbour], leader: str, own: str) -> Iterator[str]:
    """Connect to all at once; a line for each that is not reached.

    leader: its address, which names the group of machines. own: a description of this machine.
    """
    if not neighbours:
        return
    with ThreadPoolExecutor(len(neighbours)) as pool:
        for each, problem in zip(neighbours, pool.map(lambda each: probe(each, leader), neighbours), strict=True):
            if problem:
                yield (
                    f"{own} cannot reach node {each.index} at {each.address}, port {each.probe_port} "
                    f"({each.interface} there): {problem}"
                )


def probe(neighbour: Neighbour, leader: str) -> str:
    """Describe why a machine is not reached; empty: it is."""
    expected = make_name(leader, neighbour.index)
    try:
        with socket.create_connection((neighbour.address, neighbour.probe_port), TIMEOUT) as connection:
            answer = b"".join(iter(lambda: connection.recv(256), b"")).decode(errors="replace")
    except TimeoutError:
        return f"no answer within {TIMEOUT:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return "" if answer == expected else "another machine has that address"
