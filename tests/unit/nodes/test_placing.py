from __future__ import annotations

import pytest

from toka_async.config import ConfigError
from toka_async.nodes.placing import PORT, NodePlace, find_place, make_address, parse_address

LWS = {"LWS_LEADER_ADDRESS": "llama-0.llama.default", "LWS_WORKER_INDEX": "1", "LWS_GROUP_SIZE": "2"}
SLURM = {"SLURM_JOB_NODELIST": "gpu[01-04,07]", "SLURM_NODEID": "4", "SLURM_NNODES": "5"}


def test_options_say_which_machine_it_is() -> None:
    place = find_place("tcp://10.0.0.1:5000", 1, 2, {})
    assert place == NodePlace("10.0.0.1", 5000, 1, 2)
    assert place.leader == "tcp://10.0.0.1:5000"


STEP = SLURM | {"SLURM_STEP_NODELIST": "gpu[03-04]", "SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1"}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        (LWS, NodePlace("llama-0.llama.default", PORT, 1, 2)),
        (SLURM, NodePlace("gpu01", PORT, 4, 5)),
        (STEP, NodePlace("gpu03", PORT, 1, 2)),
    ],
)
def test_the_environment_says_what_options_do_not(environment: dict[str, str], place: NodePlace) -> None:
    assert find_place("", None, None, environment) == place
    assert find_place("tcp://[fd00::1]:7", 0, 3, environment) == NodePlace("fd00::1", 7, 0, 3)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a1", "a1"),
        ("a1,b2", "a1"),
        ("n[3,5-6]", "n3"),
        ("rack1-n[007-010],x", "rack1-n007"),
        ("n[1-2].site", "n1.site"),
    ],
)
def test_the_leader_is_slurms_first_machine(nodes: str, first: str) -> None:
    assert find_place("", 0, 2, {"SLURM_JOB_NODELIST": nodes}).host == first


@pytest.mark.parametrize(
    ("leader", "index", "size", "environment", "message"),
    [
        ("", 0, 2, {}, "--leader: expected tcp://HOST:PORT; neither LWS_LEADER_ADDRESS nor SLURM_JOB_NODELIST is set"),
        ("a", None, 2, {}, "--index is missing; LWS_WORKER_INDEX, SLURM_NODEID are not set either"),
        ("a", 0, None, {}, "--size is missing"),
        ("a", 0, None, {"SLURM_NNODES": "two"}, "SLURM_NNODES: expected a number, got 'two'"),
        ("a", 2, 2, {}, "--index=2: expected 0 to 1, since --size=2"),
        ("http://a", 0, 2, {}, "--leader: expected tcp://HOST:PORT, got 'http://a'"),
        ("tcp://a:port", 0, 2, {}, "expected tcp://HOST:PORT"),
    ],
)
def test_mistakes_are_named(
    leader: str, index: int | None, size: int | None, environment: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        find_place(leader, index, size, environment)
    assert message in str(caught.value)


def test_addresses_of_both_families_survive() -> None:
    for host in ("10.0.0.1", "fd00::1"):
        assert parse_address(make_address(host, 9), "here") == (host, 9)
