"""What a node's agent and the leader's coordinator say to each other.

`Join` and `Refused` are read by other versions too, so their fields stay as they are. Ranks are named as in process
lists, and their lines are carried unread.
"""

from __future__ import annotations

import msgspec

from toka_async.config import Config


class Join(msgspec.Struct, frozen=True, tag=True):
    """Agent -> leader: it asks to join.

    address, interface: of its network. probe_port: where others test whether they reach it. facts: versions, by name.
    settings: the configuration that it was started with, by key; None: it takes the leader's.
    """

    index: int
    size: int
    address: str
    interface: str
    probe_port: int
    facts: dict[str, str]
    settings: dict[str, str] | None = None

    def describe(self) -> str:
        return f"node {self.index} ({self.address}, {self.interface})"


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Leader -> agent: it cannot join. again: it may ask again soon."""

    message: str
    again: bool = False


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """Leader -> agent: it has joined. It answers with Checked when it has found the model's files."""

    config: Config


class Checked(msgspec.Struct, frozen=True, tag=True):
    """Agent -> leader: hashes of the model's files. problem: why there are none."""

    facts: dict[str, str]
    problem: str = ""


class Bind(msgspec.Struct, frozen=True, tag=True):
    """Leader -> agent: open sockets for the ranks of a replica's life, and for their meeting if rank 0 is among them.

    What is left of an earlier life ends.
    """

    replica: int
    life: int
    ranks: tuple[int, ...]


class Bound(msgspec.Struct, frozen=True, tag=True):
    """Agent -> leader: the answer to Bind. addresses: of the ranks. group: where ranks meet; empty: elsewhere."""

    replica: int
    life: int
    addresses: tuple[str, ...]
    group: str


class Neighbour(msgspec.Struct, frozen=True):
    index: int
    address: str
    interface: str
    probe_port: int


class Probe(msgspec.Struct, frozen=True, tag=True):
    """Leader -> agent: test whether these are reached."""

    replica: int
    life: int
    neighbours: tuple[Neighbour, ...]


class Probed(msgspec.Struct, frozen=True, tag=True):
    """Agent -> leader: the answer to Probe. problems: a line for each neighbour that is not reached."""

    replica: int
    life: int
    problems: tuple[str, ...]


class StartRank(msgspec.Struct, frozen=True, tag=True):
    """Parent -> coordinator -> agent: start a rank. spec: its ChildSpec as JSON, which the agent completes."""

    name: str
    rank: int
    spec: bytes


class RankOrder(msgspec.Struct, frozen=True, tag=True):
    """Parent -> coordinator -> agent: a line for the rank's standard input, an Order."""

    name: str
    line: bytes


class EndRank(msgspec.Struct, frozen=True, tag=True):
    """Parent -> coordinator -> agent: kill the rank."""

    name: str


class RankLine(msgspec.Struct, frozen=True, tag=True):
    """Agent -> coordinator -> parent: a line of a rank's standard output, a Status."""

    name: str
    line: bytes


class RankGone(msgspec.Struct, frozen=True, tag=True):
    """Agent -> coordinator -> parent: a rank has ended, and how."""

    name: str
    message: str


class Dismiss(msgspec.Struct, frozen=True, tag=True):
    """Leader -> agent: all is over. code: the agent's exit code."""

    reason: str
    code: int


ToLeader = Join | Checked | Bound | Probed | RankLine | RankGone
ToNode = Refused | Accepted | Bind | Probe | StartRank | RankOrder | EndRank | Dismiss
