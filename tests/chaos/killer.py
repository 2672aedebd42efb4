"""Kills, stops and interrupts the server's processes, one after the other, at random times."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Sequence
from contextlib import suppress

from tests.chaos.service import Service
from tests.chaos.tally import Tally

DEATHS = ("rank", "scheduler", "both replicas", "pause")
REPLICAS = (*DEATHS, "rank", "scheduler", "hung rank", "hung scheduler")
EVERYTHING = (*REPLICAS, "server", "parent", "group", "hung server", "paused parent", "SIGTERM", "parent of a hung one")


class Killer:
    """Does one of `kinds` every `seconds`, on average."""

    def __init__(self, service: Service, tally: Tally, draw: random.Random, num_replicas: int) -> None:
        self._num_replicas = num_replicas
        self._service = service
        self._tally = tally
        self._draw = draw

    async def run(self, stop: asyncio.Event, seconds: float, kinds: Sequence[str]) -> None:
        """Each kind comes once before any comes again."""
        left: list[str] = []
        while not stop.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), self._draw.uniform(0.3, 1.7) * seconds)
                return
            await self._service.up.wait()
            left = left or self._draw.sample(kinds, len(kinds))
            await self.do(left.pop())

    async def do(self, kind: str) -> None:
        children = self._service.children()
        self._tally.kills[kind] += 1
        match kind:
            case "rank" | "scheduler":
                self._end_replica(self._one(children, kind), signal.SIGKILL)
            case "hung rank" | "hung scheduler":
                self._end_replica(self._one(children, kind.split()[1]), signal.SIGSTOP)
            case "both replicas":
                for pid in (pid for name, pid in children.items() if name.startswith("scheduler")):
                    self._end_replica(pid, signal.SIGKILL)
            case "pause":
                await self._pause(self._draw.choice(list(children.values())))
            case "paused parent":
                await self._pause(self._service.server.process.pid)
            case "parent of a hung one":
                self._send(self._draw.choice(list(children.values())), signal.SIGSTOP)
                self._end_front(self._service.server.process.pid, signal.SIGKILL)
            case "server" | "hung server":
                self._end_front(children.get("server"), signal.SIGKILL if kind == "server" else signal.SIGSTOP)
            case "parent" | "SIGTERM":
                number = signal.SIGKILL if kind == "parent" else signal.SIGTERM
                self._end_front(self._service.server.process.pid, number)
            case _:
                assert kind == "group", kind
                self._service.doom()
                if self._service.server.process.poll() is None:
                    self._service.server.signal_group(signal.SIGKILL)

    def _one(self, children: dict[str, int], role: str) -> int | None:
        pids = [pid for name, pid in children.items() if name.startswith(role)]
        return self._draw.choice(pids) if pids else None

    async def _pause(self, pid: int) -> None:
        """Shorter than what counts as hung."""
        self._send(pid, signal.SIGSTOP)
        await asyncio.sleep(self._draw.uniform(0.05, 0.5))
        self._send(pid, signal.SIGCONT)

    def _end_replica(self, pid: int | None, number: int) -> None:
        """With the only one everything ends."""
        if self._num_replicas == 1:
            self._end_front(pid, number)
        else:
            self._send(pid, number)

    def _end_front(self, pid: int | None, number: int) -> None:
        self._service.doom()
        self._send(pid, number)

    def _send(self, pid: int | None, number: int) -> None:
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
