"""Names and addresses of the processes of one run.

Addresses are data: nothing assumes that two processes share a machine. Knows no sockets.
"""

from __future__ import annotations

from pathlib import Path

import msgspec


class Topology(msgspec.Struct, frozen=True):
    """Where each process listens (ZeroMQ addresses), one entry per data-parallel replica.

    server: the server's inbox (Ready, Tokens, …). schedulers[d]: replica d's inbox of requests.
    scheduler_ranks[d]: replica d's inbox of StepDone. ranks[d][r]: rank r of replica d's inbox of steps.
    groups[d]: where the ranks of replica d find each other (a URL as torch.distributed takes it).
    """

    server: str
    schedulers: tuple[str, ...]
    scheduler_ranks: tuple[str, ...]
    ranks: tuple[tuple[str, ...], ...]
    groups: tuple[str, ...]


def local_topology(folder: Path, dp: int = 1, ranks: int = 1) -> Topology:
    """A topology of unix sockets under `folder` (its path must be short: sockets allow about 100 bytes)."""

    def at(name: str) -> str:
        return f"ipc://{folder / name}"

    return Topology(
        server=at("server"),
        schedulers=tuple(at(f"scheduler-{d}") for d in range(dp)),
        scheduler_ranks=tuple(at(f"scheduler-{d}-ranks") for d in range(dp)),
        ranks=tuple(tuple(at(f"rank-{d}-{r}") for r in range(ranks)) for d in range(dp)),
        groups=tuple(f"file://{folder / f'group-{d}'}" for d in range(dp)),
    )
