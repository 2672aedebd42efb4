from __future__ import annotations

from pathlib import Path

import msgspec

from toka_async.topology import Layout, Places, SharedKeys, Topology, local_places, local_topology


def test_every_process_has_its_own_socket_in_the_folder(tmp_path: Path) -> None:
    layout = Layout(dp=2, tp=3)
    topology, places = local_topology(tmp_path, layout), [local_places(tmp_path, layout, d) for d in range(2)]
    addresses = [topology.server, *topology.schedulers]
    for each in places:
        assert len(each.ranks) == 3
        addresses += [each.results, *each.ranks]
    assert len(set(addresses)) == len(addresses) == 1 + 2 + 2 + 6
    assert all(address.startswith(f"ipc://{tmp_path}/") for address in addresses)


def test_ranks_of_every_life_meet_elsewhere(tmp_path: Path) -> None:
    groups = {local_places(tmp_path, Layout(dp=2), replica, life).group for replica in (0, 1) for life in (0, 1)}
    assert len(groups) == 4


def test_addresses_are_data(tmp_path: Path) -> None:
    topology = local_topology(tmp_path)
    assert msgspec.json.decode(msgspec.json.encode(topology), type=Topology) == topology
    places = Places("tcp://10.0.0.1:5", ("tcp://10.0.0.2:6",), "tcp://10.0.0.1:7", SharedKeys("public", "secret"))
    assert msgspec.json.decode(msgspec.json.encode(places), type=Places) == places


def test_ranks_are_in_order_of_stages() -> None:
    layout = Layout(dp=2, pp=3, tp=2)
    assert layout.num_ranks == 6
    assert [layout.find_stage(rank) for rank in range(6)] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert layout.find_stage(layout.answering) == (2, 0)
    assert [layout.choose_gpu(replica, rank) for replica in (0, 1) for rank in range(6)] == [*range(12)]


def test_machines_have_equally_many_stages_and_count_their_own_gpus() -> None:
    layout = Layout(dp=2, pp=4, tp=2, nodes=2)
    assert [layout.find_node(rank) for rank in range(8)] == [0] * 4 + [1] * 4
    for replica in (0, 1):
        gpus = [layout.choose_gpu(replica, rank) for rank in range(8)]
        assert gpus == [4 * replica + gpu for gpu in (0, 1, 2, 3)] * 2
