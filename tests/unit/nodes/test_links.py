"""The two ends of a link over loopback: messages, breaks and keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from tests.drivers.until import wait_until
from toka_async.nodes.keys import derive_keys
from toka_async.nodes.leading import listen
from toka_async.nodes.links import LeaderLink, LinkRefusedError, NodeLinks
from toka_async.nodes.messages import Checked, Dismiss, EndRank, ToLeader, ToNode

KEYS = derive_keys("of this test")


class Ends:
    """A leader, and agents that connect to it."""

    def __init__(self) -> None:
        with listen("127.0.0.1") as listener:
            self.address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
            self.leader = NodeLinks(self.address, listener.detach(), KEYS, timeout=30.0)
        self.context: zmq.Context[Any] = zmq.Context()
        self.agents: list[LeaderLink] = []
        self.heard: list[tuple[bytes, ToLeader | None]] = []

    def connect(self, secret: str = "of this test") -> LeaderLink:
        self.agents.append(LeaderLink(self.context, self.address, derive_keys(secret)))
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


def test_a_wrong_secret_is_refused(ends: Ends) -> None:
    agent = ends.connect("another")
    agent.send(Checked({}))
    with pytest.raises(LinkRefusedError):
        wait_until(has_broken(agent))
    assert not list(ends.leader.receive())
