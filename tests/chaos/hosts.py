"""Hosts of a Ray cluster on this machine, as sets of namespaces: see `scripts/cluster_chaos.py`. Needs root."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

HEAD, DRIVER, WORKERS = 1, 2, (3, 4, 5)  # hosts: 10.77.0.N. The driver's has no CPU for replicas
PYTHON = sys.executable
# With these a host counts as lost after about 20 s, and by Ray's defaults after about 65. The last two let a node
# notice a head that is switched off without a word.
HEALTH = {
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "2000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "5",
    "RAY_grpc_client_keepalive_time_ms": "10000",
    "RAY_grpc_client_keepalive_timeout_ms": "10000",
}
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_DEDUP_LOGS": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # it would kill workers for the memory of the machine's other work
}
SLOTS = 2  # CPUs and pretended GPUs of a host for replicas
MOST_WAIT = 240.0  # seconds

Found = TypeVar("Found")


class Hosts:
    """The hosts, as the machine sees them."""

    def __init__(self, storage: Mapping[str, str]) -> None:
        self._storage = storage
        self.pids: dict[int, int] = {}
        self.cut: set[int] = set()
        self.off: float | None = None  # when a host was switched off
        Path("/run/netns").mkdir(exist_ok=True)
        shell("mount -t tmpfs tmpfs /run/netns && ip link set lo up")
        shell("ip link add br0 type bridge && ip link set br0 up")
        for host in (HEAD, DRIVER, *WORKERS):
            name = f"n{host}"
            shell(f"ip netns add {name} && ip link add v{host} type veth peer name eth0 netns {name}")
            shell(f"ip link set v{host} master br0 up && ip -n {name} link set lo up")
            shell(f"ip -n {name} addr add 10.77.0.{host}/24 dev eth0 && ip -n {name} link set eth0 up")
            shell(f"ip -n {name} route add default dev eth0")  # Ray asks for the way to a far address
            script = "mount -t tmpfs tmpfs /tmp && touch /tmp/up && trap '' CHLD && exec sleep infinity"  # it reaps
            unshare = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "sh", "-c", script]
            outer = subprocess.Popen(["ip", "netns", "exec", name, *unshare])
            self.pids[host] = wait_for(partial(find_child, outer.pid), f"host {host}")
            wait_for(Path(f"/proc/{self.pids[host]}/root/tmp/up").exists, f"/tmp of host {host}")

    def enter(self, host: int, *command: str) -> list[str]:
        return ["nsenter", "-t", str(self.pids[host]), "-n", "-p", "-m", *command]

    def start_node(self, host: int) -> None:
        ray = [PYTHON, "-m", "ray.scripts.scripts", "start", f"--node-ip-address=10.77.0.{host}"]
        role = ["--head", "--port=6379", "--include-dashboard=false"] if host == HEAD else ["--address=10.77.0.1:6379"]
        slots = SLOTS if host in WORKERS else 0
        size = [
            "--resources",
            json.dumps({"slot": slots}),
            f"--num-cpus={slots}",
            f"--num-gpus={slots}",
            "--object-store-memory=80000000",
        ]
        command = self.enter(host, *ray, *role, *size, "--disable-usage-stats")
        environment = {**os.environ, **QUIET, **HEALTH, **self._storage}
        with Path(f"/tmp/cluster-chaos-{host}.log").open("ab") as log:
            subprocess.run(command, env=environment, stdout=log, stderr=log, check=True)

    def keep_nodes(self) -> None:
        """Start the nodes that have ended again, for ever. A process of a replica that is left keeps it from that."""
        while True:
            for host in WORKERS:
                left = list_processes(self.pids[host])
                if host not in self.cut and all(is_left_by_ray(words) for words in left.values()):
                    for pid in left:
                        os.kill(pid, signal.SIGKILL)
                    with suppress(subprocess.CalledProcessError):  # it was cut off meanwhile
                        self.start_node(host)
            time.sleep(1)

    def count_missing(self) -> int:
        """Count the nodes that have ended."""
        found = (list_processes(self.pids[host]).values() for host in WORKERS)
        return sum(not any(words[0].endswith(b"/raylet") for words in each) for each in found)

    def set_link(self, host: int, state: str) -> None:
        shell(f"ip link set v{host} {state}")
        (self.cut.discard if state == "up" else self.cut.add)(host)

    def list_engines(self) -> dict[int, list[int]]:
        """List the processes of engines of each host."""
        return {host: sorted(list_engines(pid)) for host, pid in self.pids.items()}

    def count_locks(self) -> int:
        """Count the locks of pretended GPUs that are held."""
        held = {line.split()[5] for line in Path("/proc/locks").read_text().splitlines() if "FLOCK" in line}
        files = [
            file.stat() for pid in self.pids.values() for file in Path(f"/proc/{pid}/root/tmp").glob("toka-*.lock")
        ]
        return sum(f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}" in held for file in files)

    def switch_off(self, host: int) -> None:
        """Switch a host off; its /tmp stays, as a disk does."""
        self.off = time.monotonic()
        self.set_link(host, "down")
        for pid in list_processes(self.pids[host]):
            with suppress(ProcessLookupError):  # it has ended with another one
                os.kill(pid, signal.SIGKILL)

    def lose_raylet(self, host: int) -> None:
        for pid, command in list_processes(self.pids[host]).items():
            if command[0].endswith(b"/raylet"):
                os.kill(pid, signal.SIGKILL)


def list_processes(init: int) -> dict[int, list[bytes]]:
    """The processes of a host but its first, with their commands, by the ids that this machine knows them by."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile, or the host has
            words = (entry / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
            is_there = os.readlink(entry / "ns/pid") == os.readlink(f"/proc/{init}/ns/pid")
            if is_there and words[0] and int(entry.name) != init:  # a zombie has no words
                found[int(entry.name)] = words
    return found


def is_left_by_ray(words: Sequence[bytes]) -> bool:
    """Tell whether Ray leaves such a process when a raylet was killed: its monitor, and a worker that had no actor."""
    return words[0] == b"ray::IDLE" or any(b"log_monitor" in word for word in words)


def list_engines(init: int) -> dict[int, str]:
    """The processes of a host's engines, with their names."""
    found = {}
    for pid, words in list_processes(init).items():
        if b"toka_async.procs" in words:
            found[pid] = words[-1].decode()
        elif b"toka_async.cli" in words:
            found[pid] = "parent"
    return found


def find_parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def list_lives(init: int) -> list[dict[str, int]]:
    """The processes of each replica of a host, by their names."""
    found, lives = list_engines(init), dict[int, dict[str, int]]()
    for pid, name in sorted(found.items(), key=lambda item: item[1] != "parent"):
        with suppress(OSError, KeyError):  # it has ended meanwhile, or its parent has
            parent = find_parent(pid)
            if name == "parent":
                lives[pid] = {"worker": parent}
            lives[pid if name == "parent" else parent][name] = pid
    return list(lives.values())


def kill_one(pid: int, number: int) -> str:
    """Kill a process of an engine, or its worker; returns which, or nothing."""
    victims = list_engines(pid)
    victims |= {find_parent(engine): "worker" for engine, name in victims.items() if name == "parent"}
    if not victims:
        return ""
    victim = sorted(victims)[number % len(victims)]
    os.kill(victim, signal.SIGKILL)
    return victims[victim]


def find_child(parent: int) -> int:
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return int(children[0]) if children else 0


def shell(command: str) -> None:
    subprocess.run(command, shell=True, check=True)


def wait_for(find: Callable[[], Found], what: str, seconds: float = MOST_WAIT) -> Found:
    deadline = time.monotonic() + seconds
    while not (found := find()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not happen within {seconds:g} s")
        time.sleep(0.1)
    return found
