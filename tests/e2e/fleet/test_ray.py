"""A fleet and a job of Ray Data on a real Ray cluster: a head, and two nodes of one CPU.

Replicas are simulated. Their ranks lock the GPUs that Ray gives them, which are pretended.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from tests.drivers.until import wait_until
from tests.processes.ray_job import (
    BLOCK_ROWS,
    NUM_ROWS,
    check_rows,
    count_computed,
    list_files,
    make_rows,
    run_job,
    start_job,
)
from tests.processes.serving import alive, free_port, wait_until_gone
from toka_async.bench.loads.served import list_children
from toka_async.client import SyncClient
from toka_async.ray import Fleet, FleetError

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]
SIMULATED: dict[str, Any] = {"device": "simulated", "simulated": {"step_ms": 10.0, "gpu": "pretended"}}
VICTIMS = ("worker", "parent", "server", "scheduler-0", "rank-0-0")  # of a replica each
CHILDREN = 3  # of an engine's parent
JOB_SECONDS = 240.0  # in which a job begins, or begins again
MOST_AGAIN = 6  # blocks that are computed again for each loss
NODE: dict[str, Any] = {"num_cpus": 1, "resources": {"slot": 1}, "object_store_memory": 100_000_000}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    head: dict[str, Any] = {
        "num_cpus": 0,
        "num_gpus": 0,
        "include_dashboard": False,
        "include_log_monitor": False,  # nobody reads what it sends
        "object_store_memory": 100_000_000,
        "_system_config": {
            "memory_monitor_refresh_ms": 0,  # it would kill workers for what else runs here
            "health_check_period_ms": 500,  # a raylet that has ended is noticed soon; a slow one is waited for
            "idle_worker_killing_time_threshold_ms": 10_000,  # a new one costs a second of CPU time
        },
    }
    os.environ["RAY_DATA_PARQUET_FOOTER_NUM_ACTORS"] = "1"  # instead of 32 processes whenever files are listed
    made = Cluster(initialize_head=True, head_node_args=head)
    ray.init(made.address, log_to_driver=False, configure_logging=False)  # on the head, which nobody kills
    made.add_node(**NODE, num_gpus=len(VICTIMS))  # on one node: nodes of one machine number the same GPUs alike
    made.add_node(**NODE, num_gpus=0)
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture(scope="module")
def locks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("locks")


@pytest.fixture(scope="module")
def fleet(cluster: Cluster, locks: Path) -> Iterator[Fleet]:
    """A detached fleet of a replica for each victim."""
    del cluster
    fleet = Fleet(len(VICTIMS), "demo", name="tested", num_cpus=0.2, **SIMULATED, parallel={"gpu_locks": str(locks)})
    fleet.wait()
    yield fleet
    fleet.close()


class LockLog:
    """Follows who holds each lock. doubled: holders that took one while the holder before lived."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._follow)
        self.holders: dict[str, list[int]] = {}
        self.doubled: list[int] = []

    def __enter__(self) -> LockLog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._is_over.wait(0.005):
            for path in self._folder.iterdir():
                if text := path.read_text().strip():  # it is written in two steps
                    self._note(self.holders.setdefault(path.name, []), int(text))

    def _note(self, holders: list[int], pid: int) -> None:
        if holders[-1:] != [pid]:
            self.doubled += [pid] if alive(holders[-1:]) else []
            holders.append(pid)


def list_parents() -> dict[int, int]:
    """The parent of each process of this machine."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    return parents


def find_raylet(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


def find_workers(cluster: Cluster, parents: dict[int, int]) -> dict[int, int]:
    """The processes that the cluster's raylets have started, and by which."""
    raylets = {find_raylet(node) for node in cluster.list_all_nodes()}
    return {pid: parent for pid, parent in parents.items() if parent in raylets}


def find_engines(cluster: Cluster) -> dict[int, int]:
    """The parents of the engines whose processes have all started, and the raylets that they belong to."""
    parents = list_parents()  # of one moment, and only once: the machine has other work
    workers, num_children = find_workers(cluster, parents), Counter(parents.values())
    children = {pid: workers[parent] for pid, parent in parents.items() if parent in workers}
    return {pid: raylet for pid, raylet in children.items() if num_children[pid] == CHILDREN}


def find_lives(fleet: Fleet) -> list[dict[str, int]]:
    """The processes of all replicas, which serve."""
    places = [status.place for status in fleet.list_statuses()]
    return [find_life(place.engine) for place in places if place is not None]


def find_life(engine: int) -> dict[str, int]:
    return {"worker": list_parents()[engine], "parent": engine, **list_children(engine)}


def find_loading(cluster: Cluster) -> list[dict[str, int]]:
    """The processes of the engines; none, unless there are all of them."""
    lives = [find_life(pid) for pid in find_engines(cluster)]
    return lives if len(lives) == len(VICTIMS) else []


def kill_one_of_each(lives: Sequence[dict[str, int]]) -> list[int]:
    """Kill another process of each life; returns all of their processes."""
    for victim, life in zip(VICTIMS, lives, strict=True):
        os.kill(life[victim], signal.SIGKILL)
    return [pid for life in lives for pid in life.values()]


def wait_next_lives(fleet: Fleet, life: int) -> None:
    wait_until(lambda: all(status.life >= life for status in fleet.list_statuses()))
    fleet.wait()


def test_a_replica_that_loses_any_process_ends_and_starts_again(cluster: Cluster, fleet: Fleet, locks: Path) -> None:
    """Under load, and again while it loads: as long as this process holds the GPU's lock. No two lives hold one.

    Requests of a pool that have delivered nothing begin again, with the same seeds.
    """
    fields: dict[str, Any] = {"max_tokens": 300, "ignore_eos": True, "text": False}
    seeds, prompts = range(20), [[number, 2] for number in range(20)]
    paths = [*locks.iterdir()]
    with ExitStack() as stack:
        log = stack.enter_context(LockLog(locks))
        pool = stack.enter_context(fleet.sync_pool(max_lost=len(VICTIMS)))  # two replicas are lost twice each
        asked = stack.enter_context(ThreadPoolExecutor()).submit(pool.generate_many, prompts, seeds=seeds, **fields)
        for url in fleet.addresses():  # every replica has something to lose
            client = stack.enter_context(SyncClient(url, key=fleet.key, server_key=fleet.server_key))
            next(client.stream([1, 2, 3], max_tokens=1900, ignore_eos=True, text=False))
        lost = kill_one_of_each(find_lives(fleet))
        held = [stack.enter_context(path.open()) for path in paths]
        for lock in held:
            fcntl.flock(lock, fcntl.LOCK_EX)  # once the old life has ended, and before the new one has started
        wait_until_gone(lost)
        wait_until(lambda: not fleet.addresses())
        wait_until_gone(kill_one_of_each(wait_until(lambda: find_loading(cluster))))
        for lock in held:
            lock.close()
        wait_next_lives(fleet, 2)
        tokens = [result.samples[0].token_ids.tolist() for result in asked.result()]
        again = pool.generate_many(prompts, seeds=seeds, **fields)
        assert tokens == [result.samples[0].token_ids.tolist() for result in again]
        assert [len(each) for each in tokens] == [300] * 20
    assert {int(path.read_text()) for path in paths} == {life["rank-0-0"] for life in find_lives(fleet)}
    assert all(len(holders) > 1 for holders in log.holders.values())
    assert not log.doubled


def test_replicas_come_and_go(fleet: Fleet) -> None:
    fleet.scale(1)
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


def test_less_than_no_replica_is_refused(fleet: Fleet) -> None:
    before = fleet.addresses()
    with pytest.raises(ValueError, match="-1 replicas: expected 0 or more"):
        fleet.scale(-1)
    assert fleet.addresses() == before


def test_a_detached_fleet_is_found_by_its_name_and_outlives_its_manager(cluster: Cluster, fleet: Fleet) -> None:
    """It keeps the number of its replicas."""
    with Fleet.find("tested") as found:
        assert found.addresses() == fleet.addresses()
        assert found.key.read_text() == fleet.key.read_text()
        found.scale(2)
        found.wait()
    before = [pid for life in find_lives(fleet) for pid in life.values()]
    workers = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in find_workers(cluster, list_parents())}
    (manager,) = (pid for pid, command in workers.items() if command.startswith(b"ray::FleetManager"))
    os.kill(manager, signal.SIGKILL)
    wait_until_gone([manager, *before])
    fleet.wait()
    after = find_lives(fleet)
    assert len(after) == 2
    assert not {*before} & {pid for life in after for pid in life.values()}
    fleet.scale(0)


@pytest.mark.usefixtures("cluster")
def test_a_closed_fleet_has_ended_for_everybody() -> None:
    fleet = Fleet(0, "demo", name="closed", device="simulated")
    other = Fleet.find("closed")
    assert fleet.addresses() == other.addresses() == []
    fleet.close()
    with pytest.raises(FleetError, match="this fleet was closed"):
        fleet.addresses()
    with pytest.raises(FleetError, match="the fleet has ended"):
        other.addresses()
    with pytest.raises(ValueError, match="closed"):
        Fleet.find("closed")
    fleet.close()


@pytest.mark.usefixtures("cluster")
def test_what_is_missing_is_said() -> None:
    with Fleet(1, "/no/such/model", device="simulated", resources={"lab": 2}) as fleet:
        with pytest.raises(FleetError, match=r"replica 0 is placing: it needs 1 CPU, 2 lab .* a node has is 0 lab"):
            fleet.wait(timeout=0.5)
        with pytest.raises(FleetError, match="2 replicas cannot serve: there are 1"):
            fleet.wait(2)


@pytest.mark.usefixtures("cluster")
def test_a_mistake_is_reported_with_the_engines_words() -> None:
    with Fleet(1, "/no/such/model", device="simulated") as fleet:
        wait_until(lambda: fleet.list_statuses()[0].failures)
        assert "exit code 2): toka-async: model.path=/no/such/model" in fleet.list_statuses()[0].problem


def test_a_replica_over_two_nodes_starts_again_when_one_is_lost(cluster: Cluster, tmp_path: Path) -> None:
    """By the example for it. Its end ends everything."""
    leader, http = (free_port() for _ in range(2))
    options = ["--nodes=2", "--gpus=0", "--cpus=0.1", f"--port={leader}", "demo", "model.device=simulated"]
    command = [sys.executable, "configs/deploy/ray_nodes.py", *options, "parallel.pp=2", f"server.port={http}"]
    environment = {**os.environ, "RAY_ADDRESS": cluster.address}
    log, pids = tmp_path / "log", list[int]()

    def is_healthy() -> bool:
        assert program.poll() is None, log.read_text()
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{http}/health", timeout=10):
            return True
        return False

    def find_nodes() -> list[int]:
        found = [pid for pid in list_parents() if f":{leader} --index" in read_command(pid)]
        pids.extend(found)
        return found

    with log.open("wb") as file, subprocess.Popen(command, stdout=file, stderr=file, env=environment) as program:
        try:
            wait_until(is_healthy, log.read_text, JOB_SECONDS)
            before = find_nodes()
            assert len(before) == 2
            (agent,) = (pid for pid in before if "--index 1" in read_command(pid))
            os.kill(list_parents()[agent], signal.SIGKILL)
            wait_until_gone([agent])
            wait_until(lambda: set(find_nodes()) - set(before), log.read_text, JOB_SECONDS)
            (back,) = set(find_nodes()) - set(before)
            wait_until(lambda: "rank-0-1" in list_children(back), log.read_text, JOB_SECONDS)
            wait_until(is_healthy, log.read_text, JOB_SECONDS)
        finally:
            program.kill()
    wait_until_gone(pids)


def read_command(pid: int) -> str:
    with suppress(OSError):  # it has ended meanwhile
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


def test_a_job_that_loses_its_driver_an_engine_and_a_node_writes_each_row_once(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Each is lost in the middle. A further run computes nothing."""
    make_rows(tmp_path)

    def tell() -> str:
        return (tmp_path / "log").read_text()[-5000:]

    def compute_more() -> None:
        before = count_computed(tmp_path)
        wait_until(lambda: count_computed(tmp_path) > before + BLOCK_ROWS, tell, JOB_SECONDS)

    job = start_job(tmp_path, cluster.address)
    try:
        wait_until(lambda: list_files(tmp_path), tell, JOB_SECONDS)
    finally:
        job.kill()
        job.wait()
    wait_until(lambda: not find_engines(cluster))
    written, again = list_files(tmp_path), ThreadPoolExecutor(1).submit(run_job, tmp_path)
    compute_more()
    (engine,) = find_engines(cluster)
    os.kill(list_children(engine)["rank-0-0"], signal.SIGKILL)
    wait_until_gone([engine])
    compute_more()
    ((engine, raylet),) = find_engines(cluster).items()
    os.kill(raylet, signal.SIGKILL)
    wait_until_gone([engine])
    node = next(node for node in cluster.worker_nodes if find_raylet(node) == raylet)
    cluster.remove_node(node, allow_graceful=False)
    cluster.add_node(**NODE, num_gpus=0)
    again.result()
    files, computed = list_files(tmp_path), count_computed(tmp_path)
    assert written < files
    assert NUM_ROWS <= computed <= NUM_ROWS + 3 * MOST_AGAIN * BLOCK_ROWS
    run_job(tmp_path)
    assert (list_files(tmp_path), count_computed(tmp_path)) == (files, computed), "there was nothing left to compute"
    check_rows(tmp_path)
