"""A replica on several "machines" that are agents on this one, over loopback."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.drivers.until import wait_until
from tests.processes.serving import SMALL, Asking, Serving, alive, wait_until_gone
from toka_async.bench.loads.served import list_children

WAITING = re.compile(r"waiting for nodes at (tcp://\S+)")


class Cluster:
    """A leader and the agents of the other machines, with their files in `folder`."""

    def __init__(self, folder: Path, size: int, *overrides: str, environment: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.size = size
        self._environment = {**os.environ, **(environment or {})}
        self.agents: dict[int, subprocess.Popen[bytes]] = {}
        self.leader_errors = folder / "leader"
        options = ["--index", "0", "--size", str(size), "--leader", "tcp://127.0.0.1:0", *SMALL, *overrides]
        self.leader = self._start("leader", options, self._environment)
        self.address = ""

        def is_waiting() -> bool:
            found = WAITING.search(self.said())
            self.address = found[1] if found else ""
            return bool(found) or self.leader.poll() is not None

        wait_until(is_waiting, self.said)

    def said(self, name: str = "leader") -> str:
        return (self.folder / name).read_text(encoding="utf-8")

    def join(
        self, index: int, *options: str, environment: Mapping[str, str] | None = None, inherit: Sequence[int] = ()
    ) -> subprocess.Popen[bytes]:
        """Start a machine's agent. inherit: descriptors that it keeps."""
        where = ["--leader", self.address, "--index", str(index), "--size", str(self.size)]
        self.agents[index] = agent = self._start(
            f"agent-{index}", [*where, *options], {**self._environment, **(environment or {})}, inherit
        )
        return agent

    def ranks_of(self, index: int) -> dict[str, int]:
        """Process ids of an agent's ranks, by name."""
        return list_children(self.agents[index].pid)

    def close(self) -> None:
        processes = [self.leader, *self.agents.values()]
        pids = [pid for process in processes for pid in _list_tree(process.pid)]
        for process in processes:
            process.kill()
            process.wait()
        try:
            wait_until_gone(pids)
        finally:
            for pid in alive(pids):
                os.kill(pid, 9)
            if self.leader.stdout is not None:
                self.leader.stdout.close()

    def _start(
        self, name: str, options: Sequence[str], environment: Mapping[str, str], inherit: Sequence[int] = ()
    ) -> subprocess.Popen[bytes]:
        with (self.folder / name).open("ab") as errors:
            return subprocess.Popen(
                [sys.executable, "-m", "toka_async.cli", "node", *options],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if name == "leader" else subprocess.DEVNULL,
                stderr=errors,
                env=environment,
                pass_fds=inherit,
                start_new_session=True,
            )


def _list_tree(pid: int) -> list[int]:
    """A process and all below it."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return [pid]
    return [pid, *(each for child in children for each in _list_tree(int(child)))]


class ClusterServing(Serving):
    """The server of a cluster that has started."""

    def __init__(self, cluster: Cluster) -> None:  # the process is there already
        self.errors = cluster.leader_errors
        self.process = cluster.leader
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline().decode()
        assert self.line, f"it did not start: {self.said()}"
        Asking.__init__(self, self.line.split()[-1])
        self.children = {}
        for pid in _list_tree(self.process.pid)[1:]:
            self.children |= list_children(pid)
        self.children |= list_children(self.process.pid)


@contextmanager
def starting(
    folder: Path, size: int, *overrides: str, environment: Mapping[str, str] | None = None
) -> Iterator[Cluster]:
    """A cluster of which only the leader runs; all of it is gone afterwards. A failure shows what all machines said."""
    cluster = Cluster(folder, size, *overrides, environment=environment)
    try:
        yield cluster
    except BaseException:
        for name in ("leader", *(f"agent-{index}" for index in cluster.agents)):
            print(f"---- {name}\n{cluster.said(name)}")
        raise
    finally:
        cluster.close()
