"""Huge bodies at once, against a server as a user starts it: its memory stays, others are served, all are answered."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.drivers.until import wait_until
from tests.drivers.web_server import JSON_HEAD
from tests.processes.serving import Serving, serving

MIB = 1 << 20
SIZE = 16 * MIB
NUM_CLIENTS = 6
LIMITS = (f"limits.max_body_mb={SIZE // MIB}", f"limits.max_bodies_mb={2 * SIZE // MIB}")
BODY = b'{"prompt": "x", "max_tokens": 1}'


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(tmp_path_factory.mktemp("bodies"), "model.device=simulated", *LIMITS) as server:
        yield server


def memory(server: Serving) -> int:
    """Bytes that the server's process has in memory."""
    text = Path(f"/proc/{server.children['server']}/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0]) << 10


def send_what_fits(client: socket.socket, data: memoryview) -> memoryview:
    """What is left of it when the other end takes no more for a while."""
    client.settimeout(0.05)
    try:
        while data:
            data = data[client.send(data) :]
    except TimeoutError:
        pass
    return data


def test_huge_bodies_take_their_share_of_memory_and_all_are_answered(running: Serving) -> None:
    assert running.post("/v1/completions", prompt="x", max_tokens=1)[0] == 200
    parts, before = urlsplit(running.url), memory(running)
    request = JSON_HEAD + b"Content-Length: %d\r\n\r\n" % SIZE + BODY
    whole = memoryview(request + b" " * (SIZE - len(BODY)))
    with ExitStack() as stack:
        clients = [socket.create_connection((parts.hostname, parts.port)) for _ in range(NUM_CLIENTS)]
        for client in clients:
            stack.enter_context(client)
        most = len(whole) - MIB  # the last MiB is sent later: nobody's body is whole
        clients[0].settimeout(10)
        clients[0].sendall(whole[:most])
        left = [whole[:0], *(send_what_fits(client, whole[:most]) for client in clients[1:])]
        assert all(left[1:]), "one address has half of it: room for one body"
        wait_until(lambda: running.metric("http_bodies_waiting") == NUM_CLIENTS - 1)
        assert memory(running) - before < 2 * SIZE + NUM_CLIENTS * MIB
        assert running.metric("http_body_bytes") == SIZE
        assert running.post("/v1/completions", prompt="x", max_tokens=1)[0] == 200
        waiting = {client: whole[most - len(data) :] for client, data in zip(clients, left, strict=True)}
        while waiting:  # whoever is read can send all of it
            for client, data in list(waiting.items()):
                waiting[client] = send_what_fits(client, data)
                if not waiting[client]:
                    del waiting[client]
        for client in clients:
            client.settimeout(10)
            assert client.recv(15) == b"HTTP/1.1 200 OK"
        wait_until(lambda: running.metric("http_body_bytes") == 0)
