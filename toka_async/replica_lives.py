"""The processes of replicas' lives: on this machine at once, on several ones when these have prepared them."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from toka_async.nodes.leading import listen
from toka_async.nodes.placing import make_address
from toka_async.procs.child import ChildSpec, Prepare, Prepared
from toka_async.procs.launched import Launch, make_launch
from toka_async.supervisor import Supervisor
from toka_async.topology import Places, local_places


class ReplicaLives:
    """Starts replicas' processes.

    Args:
        first: the spec of the server or the batch.
        folder: where processes of this machine have their sockets.
        leader: where the agents of other machines join; None: all is on this machine. The coordinator and this
            machine's agent are started.
    """

    def __init__(self, first: ChildSpec, folder: Path, supervisor: Supervisor, leader: socket.socket | None) -> None:
        self._first = first
        self._folder = folder
        self._supervisor = supervisor
        self._coordinator = None
        if leader is not None:
            self._host = leader.getsockname()[0]
            spec = msgspec.structs.replace(first, role="coordinator", listen_fd=leader.fileno())
            self._coordinator = supervisor.start(make_launch(spec))
            supervisor.start(make_launch(msgspec.structs.replace(first, role="node", listen_fd=-1)))

    def begin(self, replica: int, life: int) -> Iterable[Launch]:
        """Return the processes of a replica's life; those of several machines come with `start`."""
        if self._coordinator is not None:
            self._coordinator.order(Prepare(replica, life))
            return ()
        places = local_places(self._folder, self._first.topology.layout, replica, life)
        return map(make_launch, list_replica(self._first, places, replica, life))

    def start(self, prepared: Prepared) -> None:
        """Start the processes of a life that all machines have prepared."""
        assert self._coordinator is not None
        with listen(self._host) as results:
            address = make_address(*results.getsockname()[:2])
            places = Places(address, prepared.ranks, prepared.group, prepared.keys)
            scheduler, *ranks = list_replica(self._first, places, prepared.replica, prepared.life)
            self._supervisor.start(make_launch(msgspec.structs.replace(scheduler, listen_fd=results.fileno())))
        for rank in ranks:
            self._supervisor.start_remote(make_launch(rank), self._coordinator)


def list_replica(first: ChildSpec, places: Places, replica: int, life: int = 0) -> Iterator[ChildSpec]:
    """List the processes of a replica's life, in the order in which they are stopped."""
    scheduler = msgspec.structs.replace(
        first, role="scheduler", listen_fd=-1, replica=replica, life=life, places=places
    )
    yield scheduler
    for rank in range(first.topology.layout.num_ranks):
        yield msgspec.structs.replace(scheduler, role="rank", rank=rank)


def name_leader(first: ChildSpec, leader: socket.socket) -> ChildSpec:
    """Put the leader's real address into the configuration that all processes get."""
    address = make_address(*leader.getsockname()[:2])
    cluster = msgspec.structs.replace(first.config.cluster, address=address)
    return msgspec.structs.replace(first, config=msgspec.structs.replace(first.config, cluster=cluster))
