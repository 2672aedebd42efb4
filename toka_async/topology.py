"""Names and addresses of the processes of one run.

Addresses are data: nothing assumes that two processes share a machine. Knows no sockets.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from toka_async.config import Config


class Layout(msgspec.Struct, frozen=True):
    """The ranks of `dp` replicas: each has `pp` stages of `tp` tensor ranks, on `nodes` machines.

    Rank r of a replica is tensor rank r % tp of stage r // tp. Every machine has equally many stages of each replica,
    in their order. Its GPUs are in order of replicas, then of ranks.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    nodes: int = 1

    @property
    def num_ranks(self) -> int:
        return self.pp * self.tp

    @property
    def answering(self) -> int:
        """The rank whose results count: the first of the last stage. The others of that stage sample the same."""
        return (self.pp - 1) * self.tp

    def find_stage(self, rank: int) -> tuple[int, int]:
        """A rank's stage, and its number within the stage."""
        return divmod(rank, self.tp)

    @property
    def ranks_per_node(self) -> int:
        """The ranks of one replica that a machine has."""
        return self.num_ranks // self.nodes

    def find_node(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def choose_gpu(self, replica: int, rank: int) -> int:
        """The rank's GPU, counted on its machine."""
        return replica * self.ranks_per_node + rank % self.ranks_per_node


ONE_RANK = Layout()


def make_layout(config: Config) -> Layout:
    return Layout(config.parallel.dp, config.parallel.pp, config.parallel.tp, config.cluster.nodes)


class Topology(msgspec.Struct, frozen=True):
    """Where the processes listen that outlive a replica's ranks (ZeroMQ addresses).

    server: the server's inbox (Ready, Tokens, …). schedulers[d]: replica d's inbox of requests. layout: the
    arrangement of ranks.
    """

    server: str
    schedulers: tuple[str, ...]
    layout: Layout = ONE_RANK


class SharedKeys(msgspec.Struct, frozen=True):
    """A pair of CURVE keys, 40 characters of Z85 each, that all who may connect to each other have."""

    public: str
    secret: str


class Places(msgspec.Struct, frozen=True):
    """Where the processes of one life of a replica listen (ZeroMQ addresses).

    results: the scheduler's inbox of StepDone. ranks[r]: rank r's inbox of steps. group: where the ranks find each
    other (a URL for torch.distributed). keys: of all these sockets; None: other machines cannot reach them.
    """

    results: str = ""
    ranks: tuple[str, ...] = ()
    group: str = ""
    keys: SharedKeys | None = None


def local_topology(folder: Path, layout: Layout = ONE_RANK) -> Topology:
    """Make a topology of unix sockets under `folder` (its path must be short: sockets allow about 100 bytes)."""
    return Topology(
        server=_at(folder, "server"),
        schedulers=tuple(_at(folder, f"scheduler-{d}") for d in range(layout.dp)),
        layout=layout,
    )


def local_places(folder: Path, layout: Layout = ONE_RANK, replica: int = 0, life: int = 0) -> Places:
    """Make the places of a life whose ranks are all on this machine: unix sockets and a file under `folder`."""
    return Places(
        results=_at(folder, f"scheduler-{replica}-ranks"),
        ranks=tuple(_at(folder, f"rank-{replica}-{rank}") for rank in range(layout.num_ranks)),
        group=f"file://{folder / f'group-{replica}-{life}'}",
    )


def _at(folder: Path, name: str) -> str:
    return f"ipc://{folder / name}"
