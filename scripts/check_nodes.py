"""Checks a replica on several machines by network namespaces, each with processes and a network of its own.

    sudo PYTHONPATH=. .venv/bin/python scripts/check_nodes.py
    sudo PYTHONPATH=. .venv/bin/python scripts/check_nodes.py --divisions    # most of an hour on two cores
    sudo PYTHONPATH=. .venv/bin/python scripts/check_nodes.py --divisions 1,2,2 2,2,1

Needs root, `ip` and `unshare`. Two hosts serve a model in two stages over a virtual link. Greedy tokens must equal
those of one process. Then a host is switched off under load (its link goes down, and its processes are killed so that
nobody hears of it): clients must hear of it within server.hang_timeout + 5 s, and the other host must have no rank
left. Then the host is started again, and must serve. Then its link alone is cut: its own ranks must end as well.
Before all that, an agent on an interface that the leader cannot reach must end a start with a line that names both.

With --divisions, every division of a small model among up to 8 ranks with several stages is tried instead, on as few
hosts (but one) as it can be divided among: tokens must be those of one process, or tie with them within 1e-3 in
transformers' logits. The table has a row for each.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tests.processes.parallel import OPTIONS as DIVIDED
from tests.processes.parallel import Reference, all_layouts, check_tokens, make_model
from toka_async.checkpoint.division import tensor_sizes
from toka_async.checkpoint.spec import read_spec
from toka_async.nodes.links import SILENT
from toka_async.topology import Layout

NETWORK = "10.77.0"  # host k has address k + 1 in it
PORT, ADDRESS = 18400, f"tcp://{NETWORK}.1:10212"
TOKENS = 24  # of each sample
PROMPTS = [f"Question: Wei has {i} apples. Ivan has 2 times as many. How many in all?\nAnswer:" for i in range(2, 10)]
PATIENCE = 120.0  # seconds for a start on a busy machine
OPTIONS = ("demo", f"server.port={PORT}", "model.device=cpu", "cache.num_tokens=16384", "log.stats_interval=0")
ASK_ALL = f"""
import json
from tests.processes.parallel import ask_all
from tests.processes.serving import Asking
print(json.dumps(ask_all(Asking("http://127.0.0.1:{PORT}"), {TOKENS})))
"""
ASK = """
import http.client, json, sys
connection = http.client.HTTPConnection("127.0.0.1", {port}, timeout=300)
connection.request("POST", "/v1/completions", sys.stdin.buffer.read(), {{"Content-Type": "application/json"}})
print(connection.getresponse().read().decode())
"""


class Host:
    """A network namespace with an own tree of processes. Its first process only waits; all end with it."""

    def __init__(self, name: str, address: str, bridge: str) -> None:
        self.name = name
        self._link = f"v{name}"
        _run("ip", "netns", "add", name)
        _run("ip", "link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", name)
        _run("ip", "link", "set", self._link, "master", bridge, "up")
        for command in (("addr", "add", f"{address}/24", "dev", "eth0"), ("link", "set", "eth0", "up")):
            _run("ip", "-n", name, *command)
        _run("ip", "-n", name, "link", "set", "lo", "up")
        self.boot()

    def boot(self) -> None:
        inside = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sleep", "infinity"]
        self._unshare = subprocess.Popen(["ip", "netns", "exec", self.name, *inside])
        children = Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children")
        _wait(lambda: bool(children.read_text().strip()), f"{self.name} does not start", 10)
        self._first = int(children.read_text().split()[0])
        self.connect(True)

    def add_network(self, interface: str, address: str) -> None:
        """Give the host an interface that leads nowhere."""
        peer = f"{interface}-end"
        for command in (
            ("add", interface, "type", "veth", "peer", "name", peer),
            ("set", interface, "up"),
            ("set", peer, "up"),
        ):
            _run("ip", "-n", self.name, "link", *command)
        _run("ip", "-n", self.name, "addr", "add", address, "dev", interface)

    def connect(self, is_up: bool) -> None:
        """Plug the host's cable in, or pull it."""
        _run("ip", "link", "set", self._link, "up" if is_up else "down")

    def switch_off(self) -> None:
        self.connect(False)
        self._unshare.kill()  # and with it all processes, whose last words go nowhere
        self._unshare.wait()

    def start(self, command: Sequence[str], log: Path, **environment: str) -> subprocess.Popen[bytes]:
        with log.open("ab") as file:
            return subprocess.Popen(
                [*self._enter(), *command],
                stdout=file,
                stderr=file,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **environment},
            )

    def ask(self, body: dict[str, Any]) -> Any:
        """POST to the server on this host, from inside it."""
        done = self.run(ASK.format(port=PORT), json.dumps(body))
        if done.returncode:
            return {"error": {"message": done.stderr.strip().splitlines()[-1]}}
        return json.loads(done.stdout)

    def run(self, program: str, data: str = "") -> subprocess.CompletedProcess[str]:
        """Run a Python program on this host."""
        command = [*self._enter(), sys.executable, "-c", program]
        return subprocess.run(command, input=data, capture_output=True, check=False, text=True)

    def list_ranks(self) -> list[str]:
        """Names of the ranks' processes that live on this host."""
        namespace = os.readlink(f"/proc/{self._first}/ns/pid")
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                arguments = (folder / "cmdline").read_bytes().split(b"\0")
                if os.readlink(folder / "ns/pid") == namespace and b"toka_async.procs" in arguments:
                    name = arguments[arguments.index(b"toka_async.procs") + 1].decode()
                    found += [name] if name.startswith("rank-") else []
            except OSError:
                continue
        return found

    def remove(self) -> None:
        self._unshare.kill()
        self._unshare.wait()
        _run("ip", "netns", "del", self.name)

    def _enter(self) -> list[str]:
        return ["nsenter", "-t", str(self._first), "-n", "-p", "-m"]


def _signal(entered: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to what was started on a host: the process here only waits for it."""
    (pid,) = Path(f"/proc/{entered.pid}/task/{entered.pid}/children").read_text().split()
    os.kill(int(pid), number)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _wait(is_done: Callable[[], bool], what: str, seconds: float = PATIENCE) -> float:
    """Wait until it is done; returns the seconds that took."""
    began = time.monotonic()
    while not is_done():
        if time.monotonic() - began > seconds:
            _fail(f"{what} within {seconds:g} s")
        time.sleep(0.05)
    return time.monotonic() - began


def _fail(message: str) -> NoReturn:
    raise SystemExit(f"FAILED: {message}")


def _say(message: str) -> None:
    print(message, flush=True)


def _ask_all(host: Host) -> list[str]:
    body = {"model": "demo", "prompt": PROMPTS, "max_tokens": 48, "temperature": 0, "n": 2}
    answer = host.ask(body)
    if "choices" not in answer:
        _fail(f"no answer: {answer}")
    return [choice["text"] for choice in answer["choices"]]


class Load:
    """Requests that run for minutes: what clients hear of an end."""

    def __init__(self, host: Host) -> None:
        self.ends: list[tuple[float, str]] = []
        body = {"model": "demo", "prompt": "Once", "max_tokens": 1900, "n": 64, "ignore_eos": True, "temperature": 1}

        def ask() -> None:
            answer = host.ask(body)
            self.ends.append((time.monotonic(), answer.get("error", {}).get("message", "")))

        self._threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in self._threads:
            thread.start()

    def wait(self, since: float, seconds: float) -> tuple[float, str]:
        """Wait until all have ended: the seconds that the last one took, and what it heard."""
        for thread in self._threads:
            thread.join(max(0.1, since + seconds + 30 - time.monotonic()))
        if len(self.ends) < len(self._threads):
            _fail("clients were left waiting")
        at, message = max(self.ends)
        if not message:
            _fail("requests ended before the host did: give them more tokens")
        return at - since, message


class Cluster:
    """Two hosts with a leader and an agent."""

    def __init__(self, hosts: Sequence[Host], folder: Path, hang_timeout: float) -> None:
        self.leader, self.other = hosts
        self.folder = folder
        self.log = folder / "leader.log"
        self._hang_timeout = hang_timeout
        self._key = {"TOKA_CLUSTER_KEY": secrets.token_hex(32), "TMPDIR": str(folder)}

    def start_leader(self) -> None:
        options = [*OPTIONS, "parallel.pp=2", f"server.hang_timeout={self._hang_timeout}"]
        self._start(self.leader, 0, options, self.log)

    def start_agent(self, *options: str) -> None:
        self._start(self.other, 1, options, self.folder / "agent.log")

    def wait_until_serving(self, times: int = 1) -> float:
        words = "serving demo" if times == 1 else "is back"
        least = 1 if times == 1 else times - 1
        return _wait(lambda: self.log.read_text().count(words) >= least, f"no start: see {self.log}")

    def _start(self, host: Host, index: int, options: Sequence[str], log: Path) -> None:
        node = ["node", "--leader", ADDRESS, "--index", str(index), "--size", "2", *options]
        host.start([sys.executable, "-m", "toka_async.cli", *node], log, **self._key)


def check_loss(cluster: Cluster, hang_timeout: float, lose: Callable[[], None], what: str) -> None:
    """Lose the other host under load."""
    load = Load(cluster.leader)
    time.sleep(3)
    since = time.monotonic()
    lose()
    most = (hang_timeout or SILENT) + 5
    seconds, message = load.wait(since, most)
    _say(f"{what}: clients heard after {seconds:.1f} s: {message}")
    if seconds > most:
        _fail(f"clients heard after {seconds:.1f} s")
    _say(f"no rank is left on the leader's host after {_wait_empty(cluster.leader):.1f} s more")


def _wait_empty(host: Host) -> float:
    return _wait(lambda: not host.list_ranks(), f"ranks are left on {host.name}: {host.list_ranks()}", 20)


def check_unreachable(hosts: Sequence[Host], folder: Path) -> None:
    """An agent on a network that the leader has no route to: the start ends before weights load, and says why."""
    hosts[1].add_network("lab0", "10.88.0.2/24")
    (folder / "unreachable").mkdir()
    cluster = Cluster(hosts, folder / "unreachable", 10.0)
    cluster.start_leader()
    cluster.start_agent("--interface", "lab0")
    words = "cannot reach node 1 at 10.88.0.2"
    seconds = _wait(lambda: words in cluster.log.read_text(), f"no such line in {cluster.log}: {words}", 60)
    (line,) = [line for line in cluster.log.read_text().splitlines() if words in line]
    _say(f"unreachable neighbour: after {seconds:.1f} s: {line}")
    _wait_empty(hosts[0])


def check_all(hosts: Sequence[Host], folder: Path, hang_timeout: float) -> None:
    leader, other = hosts
    leader.start([sys.executable, "-m", "toka_async.cli", "serve", *OPTIONS], folder / "single.log", TMPDIR=str(folder))
    _wait(lambda: "serving demo" in (folder / "single.log").read_text(), f"no start: see {folder / 'single.log'}")
    expected = _ask_all(leader)
    leader.switch_off()
    leader.boot()

    check_unreachable(hosts, folder)
    cluster = Cluster(hosts, folder, hang_timeout)
    cluster.start_leader()
    cluster.start_agent()
    cluster.wait_until_serving()
    _say(f"ranks: {leader.list_ranks()} on one host, {other.list_ranks()} on the other")
    if _ask_all(leader) != expected:
        _fail("tokens of two hosts differ from those of one process")
    _say("tokens of two hosts equal those of one process")

    check_loss(cluster, hang_timeout, other.switch_off, "host switched off")
    other.boot()
    cluster.start_agent()
    cluster.wait_until_serving(2)
    if _ask_all(leader) != expected:
        _fail("tokens differ after the restart")
    _say("the host was started again: tokens equal those of one process")

    check_loss(cluster, hang_timeout, lambda: other.connect(False), "cable pulled")
    _say(f"no rank is left on the other host after {_wait_empty(other):.1f} s more")
    other.connect(True)
    cluster.wait_until_serving(3)
    if _ask_all(leader) != expected:
        _fail("tokens differ after the cable was put back")
    _say("the cable was put back: tokens equal those of one process")


def check_divisions(hosts: Sequence[Host], folder: Path, model: Path, layouts: Sequence[Layout]) -> None:
    """Compare the tokens of every division with one process's; prints a row for each."""
    reference = Reference(model)
    expected = _ask_divided(hosts, folder, model, Layout())
    _say("dp pp tp hosts | seconds | samples that differ by a tie")
    num_failed = 0
    for layout in layouts:
        began = time.monotonic()
        try:
            answers = _ask_divided(hosts, folder, model, layout)
            result = f"{check_tokens(reference, expected, answers, TOKENS)} of {len(expected)}"
        except (AssertionError, SystemExit) as error:
            num_failed += 1
            result = f"FAILED: {error}"
        seconds = time.monotonic() - began
        _say(f"{layout.dp:2} {layout.pp:2} {layout.tp:2} {layout.nodes:5} | {seconds:7.1f} | {result}")
    if num_failed:
        _fail(f"{num_failed} of {len(layouts)} divisions")


def _ask_divided(hosts: Sequence[Host], folder: Path, model: Path, layout: Layout) -> list[list[int]]:
    """Serve with as many hosts as the layout has, ask, and stop by SIGTERM, after which no process may be left."""
    key = {"TOKA_CLUSTER_KEY": secrets.token_hex(32), "TMPDIR": str(folder)}
    sizes = [f"parallel.{name}={getattr(layout, name)}" for name in ("dp", "pp", "tp")]
    options = [f"model.path={model}", *sizes, f"server.port={PORT}", "model.device=cpu", *DIVIDED]
    log = folder / f"{layout.dp}-{layout.pp}-{layout.tp}.log"
    started = []
    for index, host in enumerate(hosts[: layout.nodes]):
        node = ["node", "--leader", ADDRESS, "--index", str(index), "--size", str(layout.nodes)]
        command = [sys.executable, "-m", "toka_async.cli", *node, *([] if index else options)]
        started.append(host.start(command, log, **key))
    try:
        _wait(lambda: "serving" in log.read_text(), f"no start: see {log}")
        done = hosts[0].run(ASK_ALL)
        assert done.returncode == 0, done.stderr.strip().splitlines()[-1]
        answers: list[list[int]] = json.loads(done.stdout)
        _signal(started[0], signal.SIGTERM)
        assert all(process.wait(60) == 0 for process in started), f"they did not stop: see {log}"
        assert not any(host.list_ranks() for host in hosts), "ranks are left"
        return answers
    finally:
        for host in hosts[: layout.nodes]:
            host.switch_off()
            host.boot()


def list_layouts(folder: Path) -> list[Layout]:
    """List all divisions of the model that have several stages."""
    spec = read_spec(folder)
    return [spread(layout) for layout in all_layouts(spec.num_layers, tensor_sizes(spec)) if layout.pp > 1]


def parse_layout(text: str) -> Layout:
    return spread(Layout(*map(int, text.split(","))))


def spread(layout: Layout) -> Layout:
    """The layout on as few hosts as its stages can be divided among, one aside."""
    nodes = next(number for number in range(2, layout.pp + 1) if layout.pp % number == 0)
    return Layout(layout.dp, layout.pp, layout.tp, nodes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hang-timeout", type=float, default=10.0, help="0: machines count as silent after 60 s")
    parser.add_argument("--divisions", nargs="*", metavar="DP,PP,TP", help="compare tokens of these, or of all")
    options = parser.parse_args()
    prefix = f"tk{os.getpid() % 10000}"
    bridge, hosts = f"{prefix}b", []
    _run("ip", "link", "add", bridge, "type", "bridge")
    folder = Path(tempfile.mkdtemp(prefix="nodes-", dir="/tmp"))
    _say(f"logs are in {folder}")
    model = make_model(folder / "model")
    layouts = [] if options.divisions is None else [*map(parse_layout, options.divisions)] or list_layouts(model)
    try:
        _run("ip", "link", "set", bridge, "up")
        for number in range(max((layout.nodes for layout in layouts), default=2)):
            hosts.append(Host(f"{prefix}h{number}", f"{NETWORK}.{number + 1}", bridge))
        if layouts:
            check_divisions(hosts, folder, model, layouts)
        else:
            check_all(hosts, folder, options.hang_timeout)
    finally:
        for host in hosts:
            host.remove()
        _run("ip", "link", "del", bridge)
    _say("PASSED")


if __name__ == "__main__":
    main()
