from __future__ import annotations

from pathlib import Path

import msgspec

from toka_async.topology import Layout, Topology, local_topology


def test_every_process_has_its_own_socket_in_the_folder(tmp_path: Path) -> None:
    topology = local_topology(tmp_path, Layout(dp=2, tp=3))
    ranks = [address for replica in topology.ranks for address in replica]
    addresses = [topology.server, *topology.schedulers, *topology.scheduler_ranks, *ranks]
    assert len(set(addresses)) == len(addresses) == 1 + 2 + 2 + 6
    assert [len(replica) for replica in topology.ranks] == [3, 3]
    assert all(address.startswith(f"ipc://{tmp_path}/") for address in addresses)


def test_addresses_are_data(tmp_path: Path) -> None:
    topology = local_topology(tmp_path)
    assert msgspec.json.decode(msgspec.json.encode(topology), type=Topology) == topology


def test_ranks_are_in_order_of_stages() -> None:
    layout = Layout(dp=2, pp=3, tp=2)
    assert layout.num_ranks == 6
    assert [layout.find_stage(rank) for rank in range(6)] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert layout.find_stage(layout.answering) == (2, 0)
    assert [layout.choose_gpu(replica, rank) for replica in (0, 1) for rank in range(6)] == [*range(12)]
