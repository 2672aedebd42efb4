"""The server as an operator runs it: started again whenever it has ended, on the same addresses and the same data."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from tests.processes.serving import Serving, alive
from toka_async.bench.loads.served import list_children

START_TRIES = 20  # what is left of the server before may hold the folder for a moment
READY_TIMEOUT = 60.0
STOP_TIMEOUT = 5.0  # seconds in which children end with their parent


@dataclass(frozen=True, slots=True)
class Process:
    """Ids are used again; with when it began it is one process."""

    pid: int
    began: int

    @property
    def lives(self) -> bool:
        return bool(alive([self.pid])) and beginning(self.pid) == self.began


def beginning(pid: int) -> int | None:
    """In ticks since the machine's start; None: there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return None


class Service:
    """One address, one server after the other.

    Attributes:
        up: set while a server is there and was not told to end.
        num_ends: how often the front end was made to end: whoever was connected may see a broken connection.
        num_refused: starts that found what was left of the server before.
        seen: all processes that there ever were.
    """

    def __init__(self, folder: Path, *overrides: str) -> None:
        self._folder = folder
        http, direct = free_ports(2)
        self.url, self.zmq_url = f"http://127.0.0.1:{http}", f"tcp://127.0.0.1:{direct}"
        self.data_dir = folder / "data"
        self._overrides = (
            f"server.port={http}",
            f"zmq.bind={self.zmq_url}",
            f"server.data_dir={self.data_dir}",
            *overrides,
        )
        self.up = asyncio.Event()
        self.num_ends = self.num_starts = self.num_refused = 0
        self.seen: set[Process] = set()
        self.exit_codes: list[int] = []
        self.server: Serving
        self._stopping = False

    @property
    def is_doomed(self) -> bool:
        return not self.up.is_set()

    def doom(self) -> None:
        """The front end is about to end."""
        self.up.clear()
        self.num_ends += 1

    def children(self) -> dict[str, int]:
        found = list_children(self.server.process.pid)
        self._see(found.values())
        return found

    def _see(self, pids: Iterable[int]) -> None:
        self.seen.update(Process(pid, began) for pid in pids if (began := beginning(pid)) is not None)

    async def start(self) -> None:
        self.server = await asyncio.to_thread(self._start)
        self._see(self.server.pids)
        self.up.set()

    def _start(self) -> Serving:
        for left in reversed(range(START_TRIES)):
            folder = self._folder / f"run{self.num_starts}"
            folder.mkdir()
            self.num_starts += 1
            try:
                return Serving(folder, *self._overrides)
            except AssertionError:
                if not left:
                    raise
                self.num_refused += 1
                time.sleep(0.1)
        raise AssertionError("unreachable")

    async def operate(self) -> None:
        """Starts it again when it has ended; ends with `stop`."""
        while True:
            code = await asyncio.to_thread(self.server.process.wait)
            self.exit_codes.append(code)
            if self._stopping:
                return
            if self.up.is_set():
                self.doom()
            assert self.server.process.stdout is not None
            self.server.process.stdout.close()
            await self.start()

    async def stop(self, timeout: float) -> list[str]:
        """An orderly end; what is wrong with it."""
        self._stopping = True
        self.children()
        self.up.clear()
        self.server.process.send_signal(signal.SIGTERM)
        faults = []
        try:
            code = await asyncio.to_thread(self.server.process.wait, timeout)
            if code:
                faults.append(f"the exit code after SIGTERM is {code}: {self.server.said()[-500:]}")
        except Exception as error:
            faults.append(f"it does not end: {error}")
        return faults + await asyncio.to_thread(self._orphans)

    def _orphans(self) -> list[str]:
        deadline = time.monotonic() + STOP_TIMEOUT
        while left := [process.pid for process in self.seen if process.lives]:
            if time.monotonic() > deadline:
                return [f"processes {left} are left"]
            time.sleep(0.01)
        folders = [path.name for path in Path(tempfile.gettempdir()).glob("toka-*")]
        return [f"socket folders are left: {folders}"] if folders else []

    def kill_all(self) -> None:
        """Whatever is left, and whatever state it is in."""
        self._stopping = True
        self.children()
        self.server.process.kill()
        self.server.process.wait()
        assert self.server.process.stdout is not None
        self.server.process.stdout.close()
        for process in self.seen:
            if process.lives:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)

    def said(self) -> str:
        """What all servers have said."""
        return "".join(path.read_text(encoding="utf-8") for path in sorted(self._folder.glob("run*/stderr")))

    async def wait_healthy(self) -> None:
        """Raises TimeoutError."""
        async with asyncio.timeout(READY_TIMEOUT), aiohttp.ClientSession() as http:
            while True:
                await self.up.wait()
                with suppress(aiohttp.ClientError):
                    async with http.get(f"{self.url}/health") as response:
                        if response.status == 200:
                            return
                await asyncio.sleep(0.05)

    async def load(self) -> dict[str, Any]:
        return dict(json.loads(await self._get("/load")))

    async def metrics(self) -> dict[str, float]:
        """By name and labels, as it is written there."""
        lines = (await self._get("/metrics")).splitlines()
        pairs = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}

    async def _get(self, path: str) -> str:
        async with aiohttp.ClientSession() as http, http.get(self.url + path) as response:
            return await response.text()


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()
