"""Names and addresses of the processes of one run.

Addresses are data: nothing assumes that two processes share a machine. Knows no sockets.
"""

from __future__ import annotations

from pathlib import Path

import msgspec


class Layout(msgspec.Struct, frozen=True):
    """The ranks of `dp` replicas: each has `pp` stages of `tp` tensor ranks.

    Rank r of a replica is tensor rank r % tp of stage r // tp. GPUs are in order of replicas, then of ranks.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1

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

    def choose_gpu(self, replica: int, rank: int) -> int:
        return replica * self.num_ranks + rank


ONE_RANK = Layout()


class Topology(msgspec.Struct, frozen=True):
    """Where each process listens (ZeroMQ addresses), one entry per data-parallel replica.

    server: the server's inbox (Ready, Tokens, …). schedulers[d]: replica d's inbox of requests. scheduler_ranks[d]:
    replica d's inbox of StepDone. ranks[d][r]: rank r of replica d's inbox of steps. groups[d]: where the ranks of
    replica d find each other (a URL for torch.distributed). layout: the arrangement of ranks.
    """

    server: str
    schedulers: tuple[str, ...]
    scheduler_ranks: tuple[str, ...]
    ranks: tuple[tuple[str, ...], ...]
    groups: tuple[str, ...]
    layout: Layout = ONE_RANK


def local_topology(folder: Path, layout: Layout = ONE_RANK) -> Topology:
    """Make a topology of unix sockets under `folder` (its path must be short: sockets allow about 100 bytes)."""

    dp, num_ranks = layout.dp, layout.num_ranks

    def at(name: str) -> str:
        return f"ipc://{folder / name}"

    return Topology(
        server=at("server"),
        schedulers=tuple(at(f"scheduler-{d}") for d in range(dp)),
        scheduler_ranks=tuple(at(f"scheduler-{d}-ranks") for d in range(dp)),
        ranks=tuple(tuple(at(f"rank-{d}-{r}") for r in range(num_ranks)) for d in range(dp)),
        groups=tuple(f"file://{folder / f'group-{d}'}" for d in range(dp)),
        layout=layout,
    )
