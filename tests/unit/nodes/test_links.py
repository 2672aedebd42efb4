"""The two ends of a link over loopback: messages, breaks and keys."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from tests.drivers.until import wait_until
from toka_async.nodes import links
from toka_async.nodes.keys import derive_keys
from toka_async.nodes.leading import listen
from toka_async.nodes.links import LeaderLink, LinkRefusedError, NodeLinks
from toka_async.nodes.messages import Checked, Dismiss, EndRank, ToLeader, ToNode

KEYS = derive_keys("of this test")


class Ends:
    """A leader, and agents that connect to it."""

    def __init__(self, hang_timeout: float = 30.0) -> None:
        with listen("127.0.0.1") as listener:
            self.address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
            self.leader = NodeLinks(self.address, listener.detach(), KEYS, hang_timeout)
        self.context: zmq.Context[Any] = zmq.Context()
        self.agents: list[LeaderLink] = []
        self.heard: list[tuple[bytes, ToLeader | None]] = []

    def connect(self, secret: str = "of this test", address: str = "") -> LeaderLink:
        self.agents.append(LeaderLink(self.context, address or self.address, derive_keys(secret)))
        return self.agents[-1]

    def hear(self, number: int) -> list[tuple[bytes, ToLeader | None]]:
        """What the leader has heard, once it is so much."""

        def has_heard() -> bool:
            self.heard.extend(self.leader.receive())
            return len(self.heard) >= number

        wait_until(has_heard)
        return self.heard

    def close(self) -> None:
        for agent in self.agents:
            if not agent.socket.closed:
                agent.close()
        self.context.term()
        self.leader.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


def receive(agent: LeaderLink) -> list[ToNode]:
    messages: list[ToNode] = []

    def has_some() -> bool:
        messages.extend(agent.receive())
        return bool(messages)

    wait_until(has_some)
    return messages


def test_messages_go_both_ways(ends: Ends) -> None:
    first, second = ends.connect(), ends.connect()
    first.send(Checked({"a": "1"}))
    ((one, _),) = ends.hear(1)
    second.send(Checked({"b": "2"}))
    (_, (other, message)) = ends.hear(2)
    assert message == Checked({"b": "2"})
    ends.leader.send(one, EndRank("rank-0-0"))
    ends.leader.send(other, Dismiss("over", 0))
    assert receive(first) == [EndRank("rank-0-0")]
    assert receive(second) == [Dismiss("over", 0)]


def test_the_leader_learns_which_agent_is_gone(ends: Ends) -> None:
    first, second = ends.connect(), ends.connect()
    for number, agent in enumerate((first, second)):
        agent.send(Checked({}, problem=str(number)))
        ends.hear(number + 1)
    second.close()
    heard = ends.hear(3)
    assert heard[2] == (heard[1][0], None)
    ends.leader.send(heard[1][0], EndRank("rank-0-0"))  # nobody is there any more
    third = ends.connect()
    third.send(Checked({}, problem="third"))
    assert ends.hear(4)[3][1] == Checked({}, problem="third")


def test_what_another_version_says_does_not_end_the_leader(ends: Ends, caplog: pytest.LogCaptureFixture) -> None:
    agent = ends.connect()
    agent.socket.send(b"\x00")
    agent.send(Checked({}))
    ((_, message),) = ends.hear(1)
    assert message == Checked({})
    assert [line.partition(":")[0] for line in caplog.messages] == ["a node says what this version does not understand"]


def has_broken(agent: LeaderLink) -> Callable[[], bool]:
    return agent.take_break


def test_an_agent_learns_that_the_leader_is_gone(ends: Ends) -> None:
    agent = ends.connect()
    agent.send(Checked({}))
    ends.hear(1)
    assert not agent.take_break()
    ends.leader.close()
    wait_until(has_broken(agent))
    ends.leader.close = lambda: None  # type: ignore[method-assign]


def test_a_wrong_secret_is_refused(ends: Ends, caplog: pytest.LogCaptureFixture) -> None:
    agent = ends.connect("another")
    agent.send(Checked({}))
    with pytest.raises(LinkRefusedError):
        wait_until(has_broken(agent))

    def has_warned() -> bool:
        assert not list(ends.leader.receive())
        return bool(caplog.messages)

    wait_until(has_warned)
    assert caplog.messages == [
        "a node with another key asked to join: TOKA_CLUSTER_KEY must be the same on all nodes"
    ]  # however often it tried


class Relay:
    """Stands before the leader. Connections stay open once it is silent, and carry nothing."""

    def __init__(self, address: str) -> None:
        self._there = ("127.0.0.1", int(address.rpartition(":")[2]))
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self.is_silent, self.is_over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._carry)
        self._thread.start()

    def _carry(self) -> None:
        here, _ = self._server.accept()
        with self._server, here, socket.create_connection(self._there) as there:
            others = {here: there, there: here}
            while not self.is_silent.wait(0.01):
                for ready in select.select([*others], [], [], 0)[0]:
                    others[ready].sendall(ready.recv(65536))
            self.is_over.wait()

    def close(self) -> None:
        self.is_silent.set()
        self.is_over.set()
        self._thread.join()


@pytest.mark.parametrize("hang_timeout", [0.0, 0.4])
def test_a_silent_machine_is_lost_also_where_processes_may_hang(
    monkeypatch: pytest.MonkeyPatch, hang_timeout: float
) -> None:
    monkeypatch.setattr(links, "SILENT", 0.4)
    ends = Ends(hang_timeout)
    relay = Relay(ends.address)
    try:
        agent = ends.connect(address=relay.address)
        agent.send(Checked({}))
        ((peer, _),) = ends.hear(1)
        ends.leader.send(peer, EndRank("rank-0-0"))
        receive(agent)
        relay.is_silent.set()
        assert ends.hear(2)[1] == (peer, None)
        wait_until(has_broken(agent))
    finally:
        relay.close()
        ends.close()
