"""A whole server as a user runs it: `toka-async serve` with its processes, and a small client.

The server gets a process group of its own, so that signals can be sent to all of it.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.drivers.until import wait_until
from toka_async.bench.loads.served import list_children

SMALL = ("server.port=0", "cache.num_tokens=32768")
STOP_TIMEOUT = 60.0


class Asking:
    """A small client of the server at `url`."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str) -> tuple[int, str]:
        """(status, body)."""
        with self._request("GET", path, None) as response:
            return response.status, response.read().decode()

    def post(self, path: str, **body: object) -> tuple[int, Any]:
        """(status, decoded body)."""
        with self._request("POST", path, body) as response:
            return response.status, json.loads(response.read())

    def stream(self, path: str, **body: object) -> Generator[dict[str, Any]]:
        """The decoded events of a streamed answer; closing the iterator disconnects."""
        with self._request("POST", path, {**body, "stream": True}) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    yield json.loads(line.removeprefix(b"data: "))

    def metric(self, name: str) -> float:
        """A metric, such as `num_requests_running`."""
        _, text = self.get("/metrics")
        return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(f"toka:{name} "))

    @contextmanager
    def _request(self, method: str, path: str, body: object) -> Iterator[http.client.HTTPResponse]:
        parts = urlsplit(self.url)
        with closing(http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)) as connection:
            connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
            with connection.getresponse() as response:
                yield response


class Serving(Asking):
    """A running server. Its standard error goes to a file in `folder`; its socket folder is made in there too."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.errors = folder / "stderr"
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "toka_async.cli", "serve", *SMALL, *overrides],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline().decode()
        if not self.line:
            with self.process:  # waits, and closes the pipe: a warning of either would fail the next test
                self.process.terminate()
        assert self.line, f"it did not start: {self.said()}"
        super().__init__(self.line.split()[-1])
        self.children = list_children(self.process.pid)

    @property
    def pids(self) -> list[int]:
        return [self.process.pid, *self.children.values()]

    def said(self) -> str:
        """All of standard error up to now."""
        return self.errors.read_text(encoding="utf-8")

    def signal_group(self, number: int) -> None:
        os.killpg(self.process.pid, number)

    def wait(self) -> int:
        """The exit code."""
        return self.process.wait(STOP_TIMEOUT)

    def wait_for_all(self) -> int:
        """The exit code of a server that has left no process behind."""
        code = self.wait()
        assert not alive(self.pids)
        return code

    def kill(self) -> None:
        """End everything that is left, whatever state it is in."""
        self.process.kill()
        self.process.wait()
        try:
            wait_until_gone(self.pids)  # children clean up after a killed parent
        finally:
            for pid in alive(self.pids):
                os.kill(pid, signal.SIGKILL)
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def serving(folder: Path, *overrides: str) -> Iterator[Serving]:
    """A server that is gone afterwards, with all of its processes."""
    server = Serving(folder, *overrides)
    try:
        yield server
    finally:
        server.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def alive(pids: Iterable[int]) -> list[int]:
    """Those of the processes that live. A zombie does not."""
    return [pid for pid in pids if _state(pid) not in ("", "Z")]


def list_session(group: int) -> list[int]:
    """The processes of a session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(session) == group and state != "Z":
            found.append(int(stat.parent.name))
    return found


def wait_until_gone(pids: Iterable[int]) -> None:
    wait_until(lambda: not alive(pids), lambda: f"processes {alive(pids)} are left")


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
