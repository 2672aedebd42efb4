"""Replicas on a real Ray cluster of one node with two CPUs. Jobs of Ray Data are tested beside it."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import urllib.request
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.drivers.until import wait_until
from tests.processes.serving import alive, wait_until_gone
from toka_async.bench.loads.served import list_children
from toka_async.client import SyncClient
from toka_async.ray import Fleet, FleetError

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]
SIMULATED: dict[str, Any] = {"device": "simulated", "simulated": {"step_ms": 5.0, "gpu": "pretended"}}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def locks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("locks")


@pytest.fixture(scope="module")
def fleet(locks: Path) -> Iterator[Fleet]:
    """A detached fleet of one replica, whose rank locks a GPU."""
    with Fleet(1, "demo", name="tested", **SIMULATED, parallel={"gpu_locks": str(locks)}) as fleet:
        fleet.wait()
        yield fleet


def find_engine(locks: Path) -> int:
    """The process id of the engine's parent, also before it serves; 0: there is none."""
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = command.read_bytes().split(b"\0")
        except OSError:  # it has ended meanwhile
            continue
        if b"serve" in words and f"parallel.gpu_locks={locks}".encode() in words and alive([int(command.parent.name)]):
            return int(command.parent.name)
    return 0


def find_parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def find_manager(raylet: int) -> int:
    """The process id of the fleet's manager, which this raylet started."""
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended meanwhile
            if (
                command.read_bytes().startswith(b"ray::FleetManager")
                and find_parent(int(command.parent.name)) == raylet
            ):
                return int(command.parent.name)
    raise AssertionError("there is no manager")


def find_processes(fleet: Fleet) -> dict[str, int]:
    """The processes of the only replica, which serves."""
    (status,) = fleet.list_statuses()
    assert status.place is not None
    return {"worker": status.place.worker, "parent": status.place.engine, **list_children(status.place.engine)}


def count_requests(fleet: Fleet) -> int:
    """Requests that the only replica holds, which serves."""
    (status,) = fleet.list_statuses()
    assert status.place is not None
    with urllib.request.urlopen(f"{status.place.url}/load", timeout=60) as answer:
        return int(json.load(answer)["requests"])


def kill(pid: int, others: Iterable[int]) -> None:
    os.kill(pid, signal.SIGKILL)
    wait_until_gone(others)


def wait_next_life(fleet: Fleet, life: int) -> None:
    wait_until(lambda: fleet.list_statuses()[0].life >= life)
    fleet.wait()


def test_a_replica_whose_worker_is_lost_starts_again(fleet: Fleet, locks: Path) -> None:
    """The worker is lost under load, and the next one while it loads: as long as this process holds the GPU's lock."""
    (path,), (url,), before = locks.iterdir(), fleet.addresses(), find_processes(fleet)
    with SyncClient(url, key=fleet.key, server_key=fleet.server_key) as client, path.open() as lock:
        events = client.stream([1, 2, 3], max_tokens=1900, ignore_eos=True, text=False)
        next(events)
        os.kill(before["worker"], signal.SIGKILL)
        fcntl.flock(lock, fcntl.LOCK_EX)  # once the old life has ended
        wait_until_gone(before.values())
        assert not fleet.addresses()
        engine = wait_until(lambda: find_engine(locks))
        wait_until(lambda: len(list_children(engine)) == 3)
        worker = find_parent(engine)
        kill(worker, [worker, engine, *list_children(engine).values()])
        lock.close()
    wait_next_life(fleet, 2)
    assert int(path.read_text()) == find_processes(fleet)["rank-0-0"]


def test_a_replica_whose_engine_is_lost_starts_again(fleet: Fleet, locks: Path) -> None:
    """A request of a pool that has delivered nothing begins again there."""
    (path,), (url,), before = locks.iterdir(), fleet.addresses(), find_processes(fleet)
    with fleet.sync_pool() as pool, ThreadPoolExecutor() as threads:
        asked = threads.submit(pool.generate, [1, 2, 3], max_tokens=1000, ignore_eos=True, text=False)
        wait_until(lambda: count_requests(fleet))
        kill(before["parent"], before.values())
        wait_next_life(fleet, 3)
        assert asked.result().samples[0].token_ids.size == 1000
        assert url not in fleet.addresses()
    assert int(path.read_text()) == find_processes(fleet)["rank-0-0"]


def test_replicas_come_and_go(fleet: Fleet) -> None:
    """The second one waits for the lock of the first one's GPU, until that is drained."""
    (first,) = fleet.addresses()
    fleet.scale(2)
    with SyncClient(first, key=fleet.key, server_key=fleet.server_key) as client:
        events = client.stream([1, 2, 3], max_tokens=20, ignore_eos=True, text=False)
        next(events)
        fleet.drain(first)
        assert sum(event.token_ids.size for event in events) == 19, "it finishes what runs"
    fleet.wait()
    (second,) = fleet.addresses()
    assert second != first
    with pytest.raises(FleetError, match=f"no replica serves at {first}"):
        fleet.drain(first)


def test_a_detached_fleet_is_found_by_its_name_and_outlives_its_manager(fleet: Fleet) -> None:
    found, before = Fleet.find("tested"), find_processes(fleet)
    assert found.addresses() == fleet.addresses()
    assert found.key.read_text() == fleet.key.read_text()
    manager = find_manager(find_parent(before["worker"]))
    kill(manager, [manager, *before.values()])
    found.wait()
    assert not {*before.values()} & {*find_processes(found).values()}


def test_a_closed_fleet_has_ended() -> None:
    with Fleet(0, "demo", device="simulated") as fleet:
        assert fleet.addresses() == []
    with pytest.raises(FleetError, match="the fleet has ended"):
        fleet.addresses()


def test_what_is_missing_is_said() -> None:
    with (
        Fleet(1, "/no/such/model", device="simulated", resources={"lab": 2}) as fleet,
        pytest.raises(FleetError, match=r"replica 0 is placing: it needs 1 CPU, 2 lab .* a node has is 0 lab"),
    ):
        fleet.wait(timeout=0.5)


def test_a_mistake_is_reported_with_the_engines_words() -> None:
    with Fleet(1, "/no/such/model", device="simulated") as fleet:
        wait_until(lambda: fleet.list_statuses()[0].failures)
        assert "exit code 2): toka-async: model.path=/no/such/model" in fleet.list_statuses()[0].problem
