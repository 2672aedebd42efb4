"""What a fleet says of its replicas, and what it needs to know to start one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from toka_async.ray.keys import FleetKeys

# placing: it waits for resources. waiting: it ended, and starts again soon.
State = Literal["placing", "loading", "serving", "draining", "waiting"]


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """How a replica is started.

    fleet: a name that no other fleet has. overrides: the configuration. num_gpus, num_cpus, resources: what the replica
    takes of one node.
    """

    fleet: str
    overrides: tuple[str, ...]
    keys: FleetKeys
    num_gpus: int
    num_cpus: float
    resources: Mapping[str, float]

    def make_bundle(self) -> dict[str, float]:
        """Make the bundle of its placement group, in Ray's names."""
        bundle = {"GPU": float(self.num_gpus), "CPU": self.num_cpus, **self.resources}
        return {name: amount for name, amount in bundle.items() if amount}


@dataclass(frozen=True, slots=True)
class ReplicaPlace:
    """Where a replica runs.

    address: of direct submission. url: of its HTTP server, which only the node itself reaches unless `server.host` says
    otherwise. node: its IP address. worker, engine: process ids of the actor and of its engine's parent.
    """

    address: str
    url: str
    node: str
    worker: int
    engine: int


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """A replica, for people.

    life: how often it was started again. place: None unless it serves. problem: why it does not serve, or what ended
    its last life. failures: starts in a row that failed. seconds: since its state changed.
    """

    index: int
    state: State
    life: int
    place: ReplicaPlace | None
    problem: str
    failures: int
    seconds: float

    def describe(self) -> str:
        return f"replica {self.index} is {self.state}: {self.problem or 'no problem is known'}"


def describe_all(statuses: Iterable[ReplicaStatus]) -> str:
    return "; ".join(status.describe() for status in statuses)
