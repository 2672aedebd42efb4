"""Joining, preparing lives, and losses, by messages and a clock of its own."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from toka_async.config import ClusterConfig, Config
from toka_async.nodes.coordination import PREPARE_TIMEOUT, RETRY, Coordination
from toka_async.nodes.messages import (
    Accepted,
    Bind,
    Bound,
    Checked,
    Dismiss,
    EndRank,
    Join,
    Probe,
    Probed,
    RankGone,
    RankLine,
    RankOrder,
    Refused,
    StartRank,
    ToLeader,
    ToNode,
)
from toka_async.topology import Layout

FACTS, FILES, SETTINGS = {"torch": "2"}, {"config.json": "1"}, {"server.port": "1"}


class FailedError(Exception):
    pass


class Leading:
    """A coordination, what it sends and what it tells. Connections are named after machines."""

    def __init__(self, layout: Layout | None = None) -> None:
        self.now = 0.0
        self.sent: list[tuple[bytes, ToNode]] = []
        self.told: list[Any] = []
        self.layout = layout or Layout(pp=2, nodes=2)
        config = Config(cluster=ClusterConfig(nodes=2, address="tcp://10.0.0.1:9", join_timeout=60))
        self.coordination = Coordination(
            self.layout,
            config,
            config.cluster.address,
            FACTS,
            FILES,
            SETTINGS,
            self,
            lambda peer, message: self.sent.append((peer, message)),
            lambda: self.now,
        )

    def place(self, replica: int, life: int, ranks: tuple[str, ...], group: str) -> None:
        self.told.append((replica, life, ranks, group))

    def hear(self, name: str, line: bytes) -> None:
        self.told.append((name, line))

    def note_gone(self, name: str, message: str) -> None:
        self.told.append((name, message))

    def fail(self, message: str) -> None:
        raise FailedError(message)

    def take(self, index: int, *messages: ToLeader, peer: bytes = b"") -> None:
        for message in messages:
            self.coordination.take(peer or b"%d" % index, message)

    def take_sent(self) -> list[tuple[bytes, ToNode]]:
        sent, self.sent = self.sent, []
        return sent

    def join(self, index: int) -> None:
        self.take(index, make_join(index), Checked(FILES))

    def serve(self) -> None:
        """Until the first life is placed."""
        self.coordination.prepare(0, 0)
        for index in range(2):
            self.join(index)
        self.answer(0)
        self.take_sent()

    def answer(self, life: int, problem: str = "") -> None:
        for index in range(2):
            self.take(index, Bound(0, life, (f"r{index}",), "" if index else "g"))
        for index in range(2):
            self.take(index, Probed(0, life, (problem,) if problem else ()))


def make_join(index: int, **fields: Any) -> Join:
    known: dict[str, Any] = {
        "index": index,
        "size": 2,
        "address": f"10.0.0.{index + 1}",
        "interface": "eth0",
        "probe_port": 5 + index,
        "facts": FACTS,
    }
    return Join(**known | fields)


def test_a_life_is_placed_when_all_have_joined_and_reach_each_other() -> None:
    leading = Leading()
    leading.coordination.prepare(0, 0)
    leading.join(1)
    ((peer, accepted),) = leading.take_sent()
    assert peer == b"1"
    assert isinstance(accepted, Accepted)
    leading.join(0)
    assert leading.take_sent()[1:] == [(b"1", Bind(0, 0, (1,))), (b"0", Bind(0, 0, (0,)))]
    leading.take(0, Bound(0, 0, ("r0",), "g"))
    assert leading.sent == []
    leading.take(1, Bound(0, 0, ("r1",), ""))
    probes = dict(leading.take_sent())
    assert isinstance(probe := probes[b"0"], Probe)
    assert [(each.index, each.address, each.probe_port) for each in probe.neighbours] == [(1, "10.0.0.2", 6)]
    leading.take(1, Probed(0, 0, ()))
    assert leading.told == []
    leading.take(0, Probed(0, 0, ()))
    assert leading.told == [(0, 0, ("r0", "r1"), "g")]


@pytest.mark.parametrize(
    ("join", "problem"),
    [
        (make_join(1, facts={"torch": "3"}), "torch is 3, and the leader's is 2"),
        (make_join(1, settings={"server.port": "2"}), "its configuration differs: server.port is 2, and the"),
        (make_join(1, size=3), "it is node 1 of 3, and the leader expects 2 nodes"),
        (make_join(2), "it is node 2 of 2, and the leader expects 2 nodes"),
    ],
)
def test_who_does_not_fit_is_refused_and_ends_a_start(
    join: Join, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    leading = Leading()
    with pytest.raises(FailedError, match=rf"node \d \(10\.0\.0\.\d, eth0\) cannot join: {problem}"):
        leading.take(1, join)
    ((_, refused),) = leading.take_sent()
    assert isinstance(refused, Refused)
    assert not refused.again

    serving = Leading()
    serving.serve()
    serving.coordination.lose(b"1")
    with caplog.at_level(logging.ERROR):
        serving.take(1, join)
    assert problem in caplog.text
    serving.join(1)
    assert isinstance(serving.take_sent()[-1][1], Accepted)


def test_other_files_of_the_model_are_refused() -> None:
    leading = Leading()
    leading.take(1, make_join(1))
    with pytest.raises(
        FailedError, match=r"node 1 .* cannot join: model.path=demo: config.json is 2, and the leader's is 1"
    ):
        leading.take(1, Checked({"config.json": "2"}))
    leading.take(1, make_join(1))
    with pytest.raises(FailedError, match="no such directory"):
        leading.take(1, Checked({}, problem="no such directory"))


def test_a_number_that_is_taken_may_be_asked_for_again() -> None:
    leading = Leading()
    leading.join(1)
    leading.take_sent()
    leading.take(1, make_join(1), peer=b"other")
    assert leading.take_sent() == [(b"other", Refused("node 1 (10.0.0.2, eth0) has joined already", again=True))]
    leading.coordination.lose(b"1")
    leading.take(1, make_join(1), peer=b"other")
    assert isinstance(leading.take_sent()[0][1], Accepted)


def test_a_start_waits_for_machines_only_so_long() -> None:
    leading = Leading()
    leading.coordination.prepare(0, 0)
    leading.join(0)
    assert leading.coordination.time_until_due() == 60
    leading.now = 60
    with pytest.raises(
        FailedError, match=r"node 1 of 2 did not join at tcp://10\.0\.0\.1:9 within 60 s: start toka-async node"
    ):
        leading.coordination.act()


def test_a_machine_that_downloads_the_model_is_waited_for() -> None:
    leading = Leading()
    leading.coordination.prepare(0, 0)
    leading.join(0)
    leading.take(1, make_join(1))
    assert leading.coordination.time_until_due() is None
    leading.now = 3600
    leading.coordination.act()
    leading.take(1, Checked(FILES))
    leading.answer(0)
    assert leading.told == [(0, 0, ("r0", "r1"), "g")]


def test_a_neighbour_that_is_not_reached_ends_a_start_and_is_tried_again_later() -> None:
    leading = Leading()
    leading.coordination.prepare(0, 0)
    for index in range(2):
        leading.join(index)
    with pytest.raises(FailedError, match="no route; no route"):
        leading.answer(0, "no route")

    serving = Leading()
    serving.serve()
    serving.coordination.prepare(0, 1)
    serving.take_sent()
    serving.answer(1, "no route")
    serving.take_sent()
    serving.now = RETRY / 2
    serving.coordination.act()
    assert serving.take_sent() == []
    assert serving.coordination.time_until_due() == RETRY / 2
    serving.now = RETRY
    serving.coordination.act()
    assert [message for _, message in serving.take_sent()] == [Bind(0, 1, (0,)), Bind(0, 1, (1,))]
    serving.answer(1)
    assert serving.told[-1] == (0, 1, ("r0", "r1"), "g")


def test_a_machine_that_does_not_answer_is_named() -> None:
    leading = Leading()
    leading.coordination.prepare(0, 0)
    for index in range(2):
        leading.join(index)
    leading.take(0, Bound(0, 0, ("r0",), "g"))
    leading.now = PREPARE_TIMEOUT
    with pytest.raises(FailedError, match="node 1 did not answer within 30 s"):
        leading.coordination.act()


def test_ranks_are_run_where_their_stage_is() -> None:
    leading = Leading()
    leading.serve()
    leading.coordination.start_rank("rank-0-1", 1, b"spec")
    leading.coordination.order("rank-0-1", b"order")
    leading.coordination.order("rank-0-7", b"order")
    assert leading.take_sent() == [(b"1", StartRank("rank-0-1", 1, b"spec")), (b"1", RankOrder("rank-0-1", b"order"))]
    leading.take(1, RankLine("rank-0-1", b"status"), RankGone("rank-0-1", "rank-0-1 was killed by SIGKILL"))
    leading.take(1, RankLine("rank-0-1", b"late"))
    assert leading.told[1:] == [
        ("rank-0-1", b"status"),
        ("rank-0-1", "rank-0-1 was killed by SIGKILL on node 1 (10.0.0.2, eth0)"),
    ]


def test_a_lost_machine_takes_its_ranks_along_and_the_next_life_waits_for_it() -> None:
    leading = Leading()
    leading.serve()
    for rank in range(2):
        leading.coordination.start_rank(f"rank-0-{rank}", rank, b"spec")
    leading.take_sent()
    leading.coordination.lose(b"1")
    assert leading.told[1:] == [("rank-0-1", "node 1 (10.0.0.2, eth0) was lost, with rank-0-1")]
    leading.coordination.end_rank("rank-0-1")
    leading.coordination.end_rank("rank-0-0")
    assert leading.take_sent() == [(b"0", EndRank("rank-0-0"))]
    leading.coordination.prepare(0, 1)
    assert leading.take_sent() == []
    leading.join(1)
    assert [message for _, message in leading.take_sent()[1:]] == [Bind(0, 1, (0,)), Bind(0, 1, (1,))]
    leading.answer(0)  # of the earlier life
    assert len(leading.told) == 2
    leading.answer(1)
    assert leading.told[2:] == [(0, 1, ("r0", "r1"), "g")]


def test_a_machine_lost_while_it_prepares_is_waited_for() -> None:
    leading = Leading()
    leading.coordination.prepare(0, 0)
    for index in range(2):
        leading.join(index)
    leading.take(0, Bound(0, 0, ("old",), "old"))
    leading.coordination.lose(b"1")
    leading.coordination.start_rank("rank-0-1", 1, b"spec")
    assert leading.told == [("rank-0-1", "node 1 was lost before rank-0-1 started")]
    leading.join(1)
    leading.answer(0)
    assert leading.told[1:] == [(0, 0, ("r0", "r1"), "g")]


def test_all_are_told_of_the_end() -> None:
    leading = Leading()
    for index in range(2):
        leading.join(index)
    leading.take_sent()
    leading.coordination.dismiss("over", 0)
    assert leading.take_sent() == [(b"0", Dismiss("over", 0)), (b"1", Dismiss("over", 0))]
