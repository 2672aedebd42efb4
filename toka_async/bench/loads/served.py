"""Runs a server under test, the real `toka-async serve`, and reads its figures from outside. Knows no load."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

STOP_TIMEOUT = 10.0  # seconds


class BenchError(Exception):
    """A benchmark cannot run, or its answers are wrong; the message is one line for the user."""


@dataclass(frozen=True, slots=True)
class Served:
    """A running server: its address, and the process ids of its children by name, such as `rank-0-0`."""

    url: str
    children: dict[str, int]

    def metrics(self) -> dict[str, float]:
        """Returns /metrics: name with labels, as written there -> value."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as response:
            lines = response.read().decode().splitlines()
        pairs = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}

    def cpu_seconds(self) -> dict[str, float]:
        return {name: cpu_seconds(pid) for name, pid in self.children.items()}


@contextmanager
def serve(overrides: Sequence[str]) -> Iterator[Served]:
    """Runs a server with that configuration on a free port, and stops it afterwards.

    Raises BenchError when it does not start; standard error says why.
    """
    command = [sys.executable, "-m", "toka_async.cli", "serve", "server.port=0", *overrides]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise BenchError("the server did not start")
        yield Served(line.split()[-1], list_children(process.pid))
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def list_children(pid: int) -> dict[str, int]:
    """Returns the process ids of a server's children by name, from /proc."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            command = (stat.parent / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        except OSError:  # the process has ended meanwhile
            continue
        if parent == pid:
            found[command[-1].decode()] = int(stat.parent.name)
    return found


def cpu_seconds(pid: int) -> float:
    """Returns the CPU time of a process with all its threads, from /proc."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
