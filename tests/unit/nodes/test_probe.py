from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from toka_async.nodes import probe as module
from toka_async.nodes.messages import Neighbour
from toka_async.nodes.probe import ProbeListener, make_name, probe_all

LEADER = "tcp://10.0.0.1:1"


@pytest.fixture
def listener() -> Iterator[ProbeListener]:
    listening = ProbeListener("127.0.0.1", make_name(LEADER, 1))
    yield listening
    listening.close()


def neighbour(port: int, index: int = 1) -> Neighbour:
    return Neighbour(index, "127.0.0.1", "lo", port)


def test_a_machine_that_answers_is_reached(listener: ProbeListener) -> None:
    assert list(probe_all([neighbour(listener.port)] * 3, LEADER, "node 0")) == []
    assert list(probe_all([], LEADER, "node 0")) == []


def test_another_machine_at_the_address_is_noticed(listener: ProbeListener) -> None:
    for where, index in ((LEADER, 2), ("tcp://10.0.0.2:1", 1)):
        (problem,) = probe_all([neighbour(listener.port, index)], where, "node 0 (10.0.0.1, eth0)")
        assert problem == (
            f"node 0 (10.0.0.1, eth0) cannot reach node {index} at 127.0.0.1, port {listener.port} (lo there): "
            "another machine has that address"
        )


def test_a_machine_that_refuses_or_is_silent_is_named(listener: ProbeListener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TIMEOUT", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        ports = [silent.getsockname()[1], closed.getsockname()[1], listener.port]
        problems = list(probe_all([neighbour(port) for port in ports], LEADER, "node 0"))
    assert [problem.rpartition(": ")[2] for problem in problems] == ["no answer within 0.05 s", "Connection refused"]
