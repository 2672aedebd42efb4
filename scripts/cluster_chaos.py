"""A Ray cluster of several hosts on this machine, and what happens to a fleet when hosts and processes are lost.

A host is a set of namespaces (network, processes, mounts) with a /tmp of its own, behind a bridge. It is cut off by its
link, and switched off by its link and SIGKILL. The model is simulated. Needs root, iproute2, util-linux, and the extra
`ray`. Nothing is left of it on the machine.

    python scripts/cluster_chaos.py cut               # a host without network for a minute, and then again with it
    python scripts/cluster_chaos.py head              # the head is switched off
    python scripts/cluster_chaos.py chaos --minutes 30

Prints what was seen and when, and at the end figures as JSON. Exits with 1 when a request was lost or wrong, or when a
process is left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

HEAD, DRIVER, WORKERS = 1, 2, (3, 4, 5)  # hosts: 10.77.0.N. The driver's has no CPU for replicas
INSIDE = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
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
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_DEDUP_LOGS": "0"}
MOST_WAIT = 240.0  # seconds
NUM_CLIENTS = 32
NUM_SEEDS = 50
NUM_TOKENS = 100

Found = TypeVar("Found")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["cut", "head", "chaos"])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--part", choices=["outside", "inside", "driver"], default="outside", help=argparse.SUPPRESS)
    options = parser.parse_args()
    match options.part:
        case "outside":
            return subprocess.run(
                [*INSIDE, PYTHON, __file__, *sys.argv[1:], "--part", "inside"], check=False
            ).returncode
        case "inside":
            return run_hosts(options)
        case _:
            return Storm(options).run()


# ---- the hosts -----------------------------------------------------------------------------------------------------


class Hosts:
    """The hosts, as the machine sees them."""

    def __init__(self) -> None:
        self.pids: dict[int, int] = {}
        self.off: float | None = None  # when a host was switched off
        Path("/run/netns").mkdir(exist_ok=True)
        shell("mount -t tmpfs tmpfs /run/netns && ip link set lo up")
        shell("ip link add br0 type bridge && ip link set br0 up")
        for host in (HEAD, DRIVER, *WORKERS):
            name = f"n{host}"
            shell(f"ip netns add {name} && ip link add v{host} type veth peer name eth0 netns {name}")
            shell(f"ip link set v{host} master br0 up && ip -n {name} link set lo up")
            shell(f"ip -n {name} addr add 10.77.0.{host}/24 dev eth0 && ip -n {name} link set eth0 up")
            script = "mount -t tmpfs tmpfs /tmp && touch /tmp/up && exec sleep infinity"
            unshare = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "sh", "-c", script]
            outer = subprocess.Popen(["ip", "netns", "exec", name, *unshare])
            self.pids[host] = wait_for(partial(find_child, outer.pid), f"host {host}")
            wait_for(Path(f"/proc/{self.pids[host]}/root/tmp/up").exists, f"/tmp of host {host}")

    def enter(self, host: int, *command: str) -> list[str]:
        return ["nsenter", "-t", str(self.pids[host]), "-n", "-p", "-m", *command]

    def start_node(self, host: int) -> None:
        ray = [PYTHON, "-m", "ray.scripts.scripts", "start", f"--node-ip-address=10.77.0.{host}"]
        role = ["--head", "--port=6379", "--include-dashboard=false"] if host == HEAD else ["--address=10.77.0.1:6379"]
        size = [f"--num-cpus={1 if host in WORKERS else 0}", "--object-store-memory=80000000", "--num-gpus=0"]
        command = self.enter(host, *ray, *role, *size, "--disable-usage-stats")
        with Path(f"/tmp/cluster-chaos-{host}.log").open("wb") as log:
            subprocess.run(command, env={**os.environ, **QUIET, **HEALTH}, stdout=log, stderr=log, check=True)

    def set_link(self, host: int, state: str) -> None:
        shell(f"ip link set v{host} {state}")

    def count_processes(self) -> dict[int, int]:
        """Count the processes of engines of each host."""
        return {host: len(list_engines(pid)) for host, pid in self.pids.items()}

    def switch_off(self, host: int) -> None:
        self.off = time.monotonic()
        self.set_link(host, "down")
        os.kill(self.pids[host], signal.SIGKILL)


def run_hosts(options: argparse.Namespace) -> int:
    hosts = Hosts()
    for host in hosts.pids:
        hosts.start_node(host)
        print(f"host {host} is up", file=sys.stderr, flush=True)
    driver = [PYTHON, __file__, options.what, "--minutes", str(options.minutes), "--seed", str(options.seed)]
    process = subprocess.Popen(
        hosts.enter(DRIVER, *driver, "--part", "driver"),
        env={**os.environ, **QUIET},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    for line in process.stdout:  # the driver's orders, and what it has to say
        answer = carry_out(hosts, line.split())
        if answer is None:
            print(line, end="", flush=True)
        else:
            process.stdin.write(json.dumps(answer) + "\n")
            process.stdin.flush()
    code = process.wait()
    if hosts.off is not None:  # without a head Ray ends the driver, before or after the replicas
        wait_for(lambda: not sum(hosts.count_processes().values()), "the fleet's end")
        print(json.dumps({"fleet_ended_after_s": round(time.monotonic() - hosts.off, 1)}), flush=True)
    return 0 if hosts.off is not None else code


def carry_out(hosts: Hosts, words: list[str]) -> object:
    match words:
        case ["!link", host, state]:
            hosts.set_link(int(host), state)
            return True
        case ["!off", host]:
            hosts.switch_off(int(host))
            return True
        case ["!engines"]:
            return hosts.count_processes()
        case ["!kill", host, number]:
            return kill_one(hosts.pids[int(host)], int(number))
    return None


def list_engines(pid: int) -> dict[int, str]:
    """The processes of engines on a host with their names, by the ids that this machine knows them by."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
            is_there = os.readlink(entry / "ns/pid") == os.readlink(f"/proc/{pid}/ns/pid")
        except OSError:  # it has ended meanwhile, or the host has
            continue
        if is_there and b"toka_async.procs" in words:
            found[int(entry.name)] = words[-1].decode()
        elif is_there and b"toka_async.cli" in words:
            found[int(entry.name)] = "parent"
    return found


def find_worker(engine: int) -> int:
    """The worker that started an engine's parent."""
    return int(Path(f"/proc/{engine}/stat").read_text().rpartition(")")[2].split()[1])


def kill_one(pid: int, number: int) -> str:
    """Kill a process of an engine, or its worker; returns which, or nothing."""
    victims = list_engines(pid)
    victims |= {find_worker(engine): "worker" for engine, name in victims.items() if name == "parent"}
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


# ---- the driver's host ---------------------------------------------------------------------------------------------


@dataclass
class Ends:
    """How requests ended. Tokens of one seed are always the same, wherever they are computed."""

    right: int = 0
    wrong: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    answers: dict[int, list[int]] = field(default_factory=dict)
    last: float = field(default_factory=time.monotonic)
    longest_gap: float = 0.0

    def note(self, seed: int, tokens: list[int]) -> None:
        now = time.monotonic()
        self.longest_gap, self.last = max(self.longest_gap, now - self.last), now
        is_right = len(tokens) == NUM_TOKENS and self.answers.setdefault(seed, tokens) == tokens
        self.right += is_right
        self.wrong += not is_right


class Storm:
    """Runs a fleet under load on the hosts, and gives orders to the machine below over standard output."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._random = random.Random(options.seed)
        self._ends = Ends()
        self._stopping = asyncio.Event()
        self._began = time.monotonic()
        self._figures: dict[str, object] = {}

    def run(self) -> int:
        import ray

        from toka_async.ray import Fleet

        ray.init("10.77.0.1:6379", _node_ip_address=f"10.77.0.{DRIVER}", log_to_driver=False)
        self._fleet = Fleet(2, "demo", device="simulated", simulated={"step_ms": 5.0, "token_us": 1.0})
        self._fleet.wait(timeout=MOST_WAIT)
        self._tell("two replicas serve")
        loop = asyncio.new_event_loop()
        load = threading.Thread(target=loop.run_until_complete, args=(self._load(),))
        load.start()
        wait_for(lambda: self._ends.right > NUM_CLIENTS, "the first answers")
        self._ends.longest_gap = 0.0
        {"cut": self._cut, "head": self._lose_head, "chaos": self._rage}[self._options.what]()
        loop.call_soon_threadsafe(self._stopping.set)
        load.join()
        ends = self._ends
        self._figures |= {"right": ends.right, "wrong": ends.wrong, "failed": ends.failed, "gap_s": ends.longest_gap}
        print(json.dumps(self._figures, indent=1), flush=True)
        return 1 if ends.wrong or ends.failed or self._figures["left"] else 0

    async def _load(self) -> None:
        async with self._fleet.pool(max_lost=1000) as pool:
            clients = [asyncio.create_task(self._ask(pool, number)) for number in range(NUM_CLIENTS)]
            await self._stopping.wait()
            await asyncio.gather(*clients)
            self._figures["late"] = pool.num_late

    async def _ask(self, pool: Any, number: int) -> None:
        seeds = random.Random(number)
        while not self._stopping.is_set():
            seed = seeds.randrange(NUM_SEEDS)
            fields = {"seed": seed, "max_tokens": NUM_TOKENS, "ignore_eos": True, "text": False}
            try:
                result = await pool.generate([1, 2, 3], **fields)
            except Exception as error:
                self._ends.failed[f"{type(error).__name__}: {error}"] += 1
                await asyncio.sleep(0.1)
                continue
            self._ends.note(seed, result.samples[0].token_ids.tolist())

    # ---- what happens

    def _cut(self) -> None:
        """Cut off the host of a replica for a minute."""
        host, before = self._choose_host(), self._fleet.addresses()
        gone = [address for address in before if f"10.77.0.{host}:" in address]
        self._order("link", host, "down")
        cut = time.monotonic()
        self._wait(lambda: not {*gone} & {*self._fleet.addresses()}, "lost_after_s", cut)
        self._wait(lambda: len(self._fleet.addresses()) == 2, "elsewhere_after_s", cut)
        while time.monotonic() - cut < 60:
            time.sleep(0.5)
        self._figures["engine_processes_while_cut"] = self._order("engines").get(str(host), 0)
        self._order("link", host, "up")
        self._wait(lambda: not self._order("engines").get(str(host), 0), "ended_after_healing_s", time.monotonic())
        self._finish()

    def _lose_head(self) -> None:
        """Switch off the head, which keeps its tables in memory: the fleet goes on for a while, and then ends."""
        self._order("off", HEAD)
        right, failed = self._ends.right, self._ends.failed.total()
        time.sleep(15)
        failed = self._ends.failed.total() - failed
        self._tell(f"in 15 s {self._ends.right - right} right, {failed} failed, gap {self._ends.longest_gap:.1f} s")
        while sum(self._order("engines").values()):  # Ray may end this process before
            time.sleep(0.5)
        os._exit(0)  # Ray would wait for its head

    def _rage(self) -> None:
        """Kill processes, cut off hosts and scale, until the time is over."""
        events: Counter[str] = Counter()
        end, cuts = time.monotonic() + self._options.minutes * 60, dict[int, float]()
        while time.monotonic() < end or cuts:
            for host in [host for host, until in cuts.items() if until < time.monotonic()]:
                self._order("link", host, "up")
                del cuts[host]
            draw = self._random.random()
            if time.monotonic() >= end:
                pass
            elif draw < 0.7:
                if name := self._order("kill", self._random.choice(WORKERS), self._random.randrange(100)):
                    events[f"kill {name}"] += 1
            elif draw < 0.85 and not cuts:
                host = self._random.choice(WORKERS)
                cuts[host] = time.monotonic() + self._random.uniform(5, 60)
                self._order("link", host, "down")
                events["cut"] += 1
            else:
                threading.Thread(target=self._fleet.scale, args=(self._random.randint(1, 3),), daemon=True).start()
                events["scale"] += 1
            time.sleep(self._random.uniform(2, 12))
            self._tell(f"{self._ends.right} right, {sum(events.values())} events, {self._fleet.addresses()}")
        self._figures["events"] = events
        self._finish()

    def _finish(self) -> None:
        """Wait until two replicas serve, and nothing of others is left."""
        self._fleet.scale(2)
        began = time.monotonic()
        self._wait(lambda: len(self._fleet.addresses()) == 2, "whole_after_s", began)
        self._wait(lambda: sum(self._order("engines").values()) == 8, "nothing_else_after_s", began)
        right = self._ends.right
        wait_for(lambda: self._ends.right > right + NUM_CLIENTS, "answers of the whole fleet")
        self._figures["left"] = sum(self._order("engines").values()) - 8

    def _choose_host(self) -> int:
        return int(self._fleet.addresses()[0].rpartition(":")[0].rpartition(".")[2])

    def _wait(self, find: Callable[[], bool], name: str, since: float) -> None:
        wait_for(find, name)
        self._figures[name] = round(time.monotonic() - since, 1)
        self._tell(f"{name}: {self._figures[name]}")

    def _order(self, *words: object) -> Any:
        print("!" + " ".join(map(str, words)), flush=True)
        return json.loads(sys.stdin.readline())

    def _tell(self, line: str) -> None:
        print(f"{time.monotonic() - self._began:7.1f} s  {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
