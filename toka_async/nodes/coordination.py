"""Which machines are there, and the preparation of replicas' lives on them. Knows no sockets and no processes.

A life is prepared when all machines have joined with equal versions and files: each opens sockets for its ranks and
tests whether it reaches the others. Only then does the leader start ranks. A machine that is lost ends all its ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from toka_async.config import Config
from toka_async.nodes.facts import find_difference
from toka_async.nodes.messages import (
    Accepted,
    Bind,
    Bound,
    Checked,
    Dismiss,
    EndRank,
    Join,
    Neighbour,
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

logger = logging.getLogger(__name__)

PREPARE_TIMEOUT = 30.0  # seconds for machines to open sockets and to test their connections
RETRY = 5.0  # seconds until a preparation that failed begins again, once a replica has served


class Leader(Protocol):
    """Who is told."""

    def place(self, replica: int, life: int, ranks: tuple[str, ...], group: str) -> None:
        """Ranks of a life can be started; `ranks` are their addresses, `group` is where they meet."""
        ...

    def hear(self, name: str, line: bytes) -> None:
        """A rank has said something."""
        ...

    def note_gone(self, name: str, message: str) -> None:
        """A rank has ended."""
        ...

    def fail(self, message: str) -> None:
        """The start cannot succeed; the user can fix it."""
        ...


@dataclass(slots=True)
class Machine:
    """A machine that has joined. peer: its connection."""

    peer: bytes
    join: Join
    is_checked: bool = False


@dataclass(slots=True)
class Preparation:
    """A life that is wanted. deadline: of the answers; None: nobody is asked yet. not_before: when to begin."""

    replica: int
    life: int
    deadline: float | None = None
    not_before: float = 0.0
    bound: dict[int, Bound] = field(default_factory=dict)
    probed: dict[int, Probed] = field(default_factory=dict)

    def reset(self, not_before: float = 0.0) -> None:
        self.deadline, self.not_before = None, not_before
        self.bound.clear()
        self.probed.clear()


class Coordination:
    """The leader's view.

    Args:
        address: the leader's, as agents are told it.
        facts, model_facts, settings: what must be equal everywhere; see `Join` and `Checked`.
        send: sends to a connection. clock: seconds, monotonic.
    """

    def __init__(
        self,
        layout: Layout,
        config: Config,
        address: str,
        facts: dict[str, str],
        model_facts: dict[str, str],
        settings: dict[str, str],
        leader: Leader,
        send: Callable[[bytes, ToNode], None],
        clock: Callable[[], float],
    ) -> None:
        self._layout = layout
        self._config = config
        self._address = address
        self._facts = facts
        self._model_facts = model_facts
        self._settings = settings
        self._leader = leader
        self._send = send
        self._clock = clock
        self._deadline = clock() + config.cluster.join_timeout
        self._nodes: dict[int, Machine] = {}
        self._wanted: dict[int, Preparation] = {}
        self._ranks: dict[str, int] = {}  # running ones, by name: their machine
        self._has_placed = False

    # ---- what the leader wants ---------------------------------------------------------------------------------------

    def prepare(self, replica: int, life: int) -> None:
        self._wanted[replica] = Preparation(replica, life)
        self._advance()

    def start_rank(self, name: str, rank: int, spec: bytes) -> None:
        index = self._layout.find_node(rank)
        if (node := self._nodes.get(index)) is None:
            self._leader.note_gone(name, f"node {index} was lost before {name} started")
            return
        self._ranks[name] = index
        self._send(node.peer, StartRank(name, rank, spec))

    def order(self, name: str, line: bytes) -> None:
        if name in self._ranks:
            self._send(self._nodes[self._ranks[name]].peer, RankOrder(name, line))

    def end_rank(self, name: str) -> None:
        if name in self._ranks:
            self._send(self._nodes[self._ranks.pop(name)].peer, EndRank(name))

    def dismiss(self, reason: str, code: int) -> None:
        """Tell all machines that all is over."""
        for node in self._nodes.values():
            self._send(node.peer, Dismiss(reason, code))

    def time_until_due(self) -> float | None:
        """Seconds until `act` has something to do; None: never."""
        waits = not self._has_placed and len(self._nodes) < self._layout.nodes
        times = [self._deadline] if waits else []
        for each in self._wanted.values():
            times += [each.deadline] if each.deadline is not None else [each.not_before] if each.not_before else []
        return max(0.0, min(times) - self._clock()) if times else None

    def act(self) -> None:
        """Do what is due."""
        now = self._clock()
        missing = [
            index for index in range(self._layout.nodes) if index not in self._nodes
        ]  # others may be downloading
        if not self._has_placed and now >= self._deadline and missing:
            self._leader.fail(
                f"{describe_nodes(missing)} of {self._layout.nodes} did not join at {self._address} within "
                f"{self._config.cluster.join_timeout:g} s: start toka-async node --leader {self._address} "
                f"--index {missing[0]} --size {self._layout.nodes} there (cluster.join_timeout)"
            )
            return
        for each in [*self._wanted.values()]:
            if each.deadline is not None and now >= each.deadline:
                answered = each.probed if len(each.bound) == self._layout.nodes else each.bound
                silent = [index for index in self._nodes if index not in answered]
                self._give_up(each, f"{describe_nodes(silent)} did not answer within {PREPARE_TIMEOUT:g} s")
        self._advance()

    # ---- what machines say -------------------------------------------------------------------------------------------

    def take(self, peer: bytes, message: ToLeader) -> None:
        """Take a message of a connection."""
        if isinstance(message, Join):
            self._greet(peer, message)
            return
        node = next((each for each in self._nodes.values() if each.peer == peer), None)
        if node is None:
            return  # refused
        match message:
            case Checked():
                self._check(node, message)
            case Bound() | Probed():
                self._note_prepared(node.join.index, message)
            case RankLine(name=name):
                if self._ranks.get(name) == node.join.index:
                    self._leader.hear(name, message.line)
            case RankGone(name=name):
                if self._ranks.get(name) == node.join.index:
                    del self._ranks[name]
                    self._leader.note_gone(name, f"{message.message} on {node.join.describe()}")

    def lose(self, peer: bytes) -> None:
        """A connection broke."""
        node = next((each for each in self._nodes.values() if each.peer == peer), None)
        if node is not None:
            logger.error("%s was lost", node.join.describe())
            self._forget(node)

    def _forget(self, node: Machine) -> None:
        index = node.join.index
        del self._nodes[index]
        for each in self._wanted.values():
            each.reset()
        for name in [name for name, where in self._ranks.items() if where == index]:
            del self._ranks[name]
            self._leader.note_gone(name, f"{node.join.describe()} was lost, with {name}")

    def _greet(self, peer: bytes, join: Join) -> None:
        node, size = Machine(peer, join), self._layout.nodes
        if not (0 <= join.index < size == join.size):
            self._refuse(node, f"it is node {join.index} of {join.size}, and the leader expects {size} nodes")
        elif join.index in self._nodes:
            there = self._nodes[join.index].join.describe()
            self._send(peer, Refused(f"{there} has joined already", again=True))
        elif difference := find_difference(self._facts, join.facts):
            self._refuse(node, difference)
        elif join.settings is not None and (difference := find_difference(self._settings, join.settings)):
            self._refuse(node, f"its configuration differs: {difference}")
        else:
            self._nodes[join.index] = node
            self._send(peer, Accepted(self._config))

    def _check(self, node: Machine, checked: Checked) -> None:
        difference = checked.problem or find_difference(self._model_facts, checked.facts)
        if difference:
            del self._nodes[node.join.index]
            self._refuse(node, f"model.path={self._config.model.path}: {difference}")
            return
        node.is_checked = True
        missing = self._find_missing()
        waits = f"; waiting for {describe_nodes(missing)}" if missing else ""
        logger.info("%s has joined%s", node.join.describe(), waits)
        self._advance()

    def _refuse(self, node: Machine, problem: str) -> None:
        """Refuse for good; a start that waits for this machine has failed."""
        message = f"{node.join.describe()} cannot join: {problem}"
        self._send(node.peer, Refused(message))
        if self._has_placed:
            logger.error("%s", message)
        else:
            self._leader.fail(message)

    def _find_missing(self) -> list[int]:
        return [i for i in range(self._layout.nodes) if i not in self._nodes or not self._nodes[i].is_checked]

    # ---- preparations ------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Begin preparations that can begin."""
        if self._find_missing():
            return
        now = self._clock()
        for each in self._wanted.values():
            if each.deadline is None and now >= each.not_before:
                each.deadline = now + PREPARE_TIMEOUT
                for index, node in self._nodes.items():
                    ranks = [rank for rank in range(self._layout.num_ranks) if self._layout.find_node(rank) == index]
                    self._send(node.peer, Bind(each.replica, each.life, tuple(ranks)))

    def _note_prepared(self, index: int, answer: Bound | Probed) -> None:
        preparation = self._wanted.get(answer.replica)
        if preparation is None or preparation.life != answer.life or preparation.deadline is None:
            return  # of a preparation that began anew
        if isinstance(answer, Bound):
            preparation.bound[index] = answer
            if len(preparation.bound) == self._layout.nodes:
                self._ask_to_probe(preparation)
            return
        preparation.probed[index] = answer
        if len(preparation.probed) < self._layout.nodes:
            return
        problems = [problem for each in preparation.probed.values() for problem in each.problems]
        if problems:
            self._give_up(preparation, "; ".join(problems))
            return
        del self._wanted[preparation.replica]
        self._has_placed = True
        bound = [preparation.bound[index] for index in range(self._layout.nodes)]
        addresses = tuple(address for each in bound for address in each.addresses)
        self._leader.place(preparation.replica, preparation.life, addresses, bound[0].group)

    def _ask_to_probe(self, preparation: Preparation) -> None:
        neighbours = [
            Neighbour(index, node.join.address, node.join.interface, node.join.probe_port)
            for index, node in sorted(self._nodes.items())
        ]
        for index, node in self._nodes.items():
            others = tuple(each for each in neighbours if each.index != index)
            self._send(node.peer, Probe(preparation.replica, preparation.life, others))

    def _give_up(self, preparation: Preparation, problem: str) -> None:
        if not self._has_placed:
            self._leader.fail(problem)
            return
        logger.error("replica %d cannot start yet: %s", preparation.replica, problem)
        preparation.reset(self._clock() + RETRY)


def describe_nodes(indices: list[int]) -> str:
    return f"node{'s' * (len(indices) > 1)} {', '.join(map(str, indices))}"
