"""A storm: clients of every kind over a server whose processes are killed, and what must hold when it is over."""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from tests.chaos.batch_clients import BatchClients
from tests.chaos.direct_clients import DirectClient
from tests.chaos.http_clients import HttpClient
from tests.chaos.killer import Killer
from tests.chaos.leaks import Use, rest, strange_files, uses
from tests.chaos.questions import Questions, whole_answer
from tests.chaos.service import Service
from tests.chaos.tally import Tally

OPTIONS = (
    "model.path=demo",
    "model.device=simulated",
    "simulated.end_rate=0.01",
    "cache.num_tokens=8192",
    "schedule.max_seqs=64",
    "zmq.grace=8",
    "server.drain_timeout=2",
    "log.stats_interval=0",
    "limits.client_timeout=20",
)
NUM_HTTP, NUM_DIRECT, NUM_BATCH = 12, 3, 3
STOP_TIMEOUT = 30.0
UNEXPECTED = ("Traceback", "internal error", "AssertionError")  # in what the server says


@dataclass(frozen=True, slots=True)
class Era:
    """seconds: how long. kinds: what is done to the processes, every `pause` seconds. name: for people.

    is_calm: no client of direct submission vanishes; where none ever does, sessions are not waited for at the end.
    """

    name: str
    seconds: float
    pause: float
    kinds: Sequence[str]
    is_calm: bool = False


@dataclass(slots=True)
class Outcome:
    """What was found. baseline, final: what processes used before and after."""

    tally: Tally
    baseline: dict[str, Use] = field(default_factory=dict)
    final: dict[str, Use] = field(default_factory=dict)
    num_starts: int = 0
    num_refused: int = 0
    exit_codes: list[int] = field(default_factory=list)


@contextmanager
def short_folder() -> Iterator[Path]:
    """For everything that a storm leaves: sockets need short paths."""
    before, cached = os.environ.get("TMPDIR"), tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as name:
        os.environ["TMPDIR"], tempfile.tempdir = name, None
        try:
            yield Path(name)
        finally:
            tempfile.tempdir = cached
            os.environ.pop("TMPDIR")
            if before is not None:
                os.environ["TMPDIR"] = before


class Storm:
    """One server, its clients and its killer. `seed` says what is asked and what is done when, as far as a seed can."""

    def __init__(
        self,
        folder: Path,
        seed: int,
        *,
        step_ms: float,
        request_timeout: float,
        hang_timeout: float = 2.0,
        num_replicas: int = 2,
    ) -> None:
        own = (
            f"server.hang_timeout={hang_timeout:g}",
            f"simulated.step_ms={step_ms:g}",
            f"limits.request_timeout={request_timeout:g}",
            f"parallel.dp={num_replicas}",
        )
        self._num_replicas = num_replicas
        self.service = Service(folder, *OPTIONS, *own)
        self.outcome = Outcome(Tally())
        self._draw = random.Random(seed)
        self._questions = Questions(random.Random(seed))
        self._batches = BatchClients(self.service, self._questions, self.outcome.tally, self._drawn())

    def _drawn(self) -> random.Random:
        return random.Random(self._draw.random())

    async def run(self, eras: Sequence[Era], watch: Callable[[Era], None], settle: float) -> Outcome:
        """watch: called every few seconds, with what goes on."""
        service, outcome = self.service, self.outcome
        await service.start()
        operator = asyncio.create_task(service.operate())
        storm = asyncio.create_task(self._rage(eras, watch, settle))
        try:
            await asyncio.wait({operator, storm}, return_when=asyncio.FIRST_COMPLETED)
            if operator.done() and not storm.done():
                await operator  # no server can be started any more
            await storm
            outcome.tally.faults += await service.stop(STOP_TIMEOUT)
            await operator
        finally:
            for task in (operator, storm):
                task.cancel()
            await asyncio.gather(operator, storm, return_exceptions=True)
            service.kill_all()
        outcome.num_starts, outcome.num_refused = service.num_starts, service.num_refused
        outcome.exit_codes = service.exit_codes
        outcome.tally.faults += self._said()
        return outcome

    async def _rage(self, eras: Sequence[Era], watch: Callable[[Era], None], settle: float) -> None:
        service, outcome = self.service, self.outcome
        await self._learn()
        outcome.tally.faults += await rest(service, None, settle, sessions=False)
        outcome.baseline = uses(service)
        for era in eras:
            await self._era(era, watch)
        await service.wait_healthy()
        await self._batches.settle(settle)
        all_calm = all(era.is_calm for era in eras)
        outcome.tally.faults += await rest(service, outcome.baseline, settle, sessions=not all_calm)
        outcome.tally.faults += strange_files(service, await self._known_files())
        outcome.final = uses(service)

    async def _era(self, era: Era, watch: Callable[[Era], None]) -> None:
        stop = asyncio.Event()
        async with self._clients(stop, is_calm=era.is_calm), asyncio.TaskGroup() as group:
            if era.kinds:
                killer = Killer(self.service, self.outcome.tally, self._drawn(), self._num_replicas)
                group.create_task(killer.run(stop, era.pause, era.kinds))
            until = asyncio.get_running_loop().time() + era.seconds
            while (left := until - asyncio.get_running_loop().time()) > 0:
                watch(era)
                await asyncio.sleep(min(left, 5.0))
            stop.set()

    @asynccontextmanager
    async def _clients(self, stop: asyncio.Event, *, is_calm: bool = False) -> AsyncIterator[None]:
        """All of them; those that are told to stop end what they have begun. is_calm: none vanishes."""
        asked = (self.service, self._questions, self.outcome.tally)
        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_HTTP):
                group.create_task(HttpClient(*asked, self._drawn()).run(stop))
            for _ in range(NUM_DIRECT):
                group.create_task(DirectClient(*asked, self._drawn(), is_calm=is_calm).run(stop))
            for _ in range(NUM_BATCH):
                group.create_task(self._batches.run(stop))
            yield

    async def _learn(self) -> None:
        """The right answers, from a server that nobody disturbs, over every way to it."""

        async def ask(http: aiohttp.ClientSession, index: int) -> None:
            question = self._questions.answerable[index]
            async with http.post(f"{self.service.url}/v1/completions", json=question.body) as response:
                answer = await response.json()
                assert response.status == 200, answer
                question.right = whole_answer(answer)

        async with aiohttp.ClientSession() as http:
            await asyncio.gather(*(ask(http, index) for index in range(len(self._questions.answerable))))
        stop = asyncio.Event()
        async with self._clients(stop, is_calm=True):
            await asyncio.sleep(0.5)
            stop.set()

    async def _known_files(self) -> set[str]:
        async with aiohttp.ClientSession() as http:
            known: set[str] = set()
            after = ""
            while True:
                async with http.get(f"{self.service.url}/v1/files?limit=1000{after}") as response:
                    page = await response.json()
                known |= {file["id"] for file in page["data"]}
                if not page["has_more"]:
                    return known
                after = f"&after={page['last_id']}"

    def _said(self) -> list[str]:
        lines = self.service.said().splitlines()
        return [line for line in lines if any(text in line for text in UNEXPECTED)]
