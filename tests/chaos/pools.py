"""A pool under load while its replicas are killed and replaced: fake ones by the hundred, or a few real servers."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.drivers.until import SECONDS, until
from tests.processes.fake_replicas import FakeFleet, fake_fleet
from tests.processes.serving import Serving, free_port
from toka_async.client import Client, Pool, ReplicaLostError

CHUNK = 4096  # requests of a call
AT_ONCE = 8  # calls
TOKENS = 4  # of a fake answer
STREAMED = 10  # one request of so many
SIMULATED = ("model.path=demo", "model.device=simulated", "schedule.max_seqs=64", "simulated.step_ms=3")


@dataclass
class PoolTally:
    """ends: answers. broken: streams that ended with ReplicaLostError. wrong: answers that are another request's."""

    ends: int = 0
    broken: int = 0
    wrong: int = 0
    kills: int = 0
    late: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    descriptors: tuple[int, int] = (0, 0)  # of this process, before and after


def count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def ask_fakes(client: Client | Pool, num_requests: int, tally: PoolTally) -> None:
    """Ask for so many answers, each with a seed of its own, and count them. The tokens are the seed."""
    numbers = iter(range(0, num_requests, CHUNK))
    prompts = list(np.random.default_rng(0).integers(0, 1 << 30, (CHUNK, 16), np.int32))

    async def ask() -> None:
        for start in numbers:
            seeds = range(start, min(num_requests, start + CHUNK))
            many = prompts[: len(seeds)]
            results = await client.generate_many(many, seeds=seeds, max_tokens=TOKENS, text=False)
            tally.ends += len(results)
            tally.wrong += sum(
                result.samples[0].token_ids.tolist() != [seed] * TOKENS
                for seed, result in zip(seeds, results, strict=True)
            )

    cpu, began = time.process_time(), time.perf_counter()
    await asyncio.gather(*(ask() for _ in range(AT_ONCE)))
    tally.cpu_seconds, tally.seconds = time.process_time() - cpu, time.perf_counter() - began


async def replace_fakes(fleet: FakeFleet, tally: PoolTally, num_requests: int, num_kills: int, seed: int) -> None:
    """Kill replicas evenly over the requests."""
    draw = random.Random(seed)
    for number in range(num_kills):
        await until(lambda: tally.ends * num_kills >= num_requests * number // 2)  # noqa: B023
        await fleet.replace(draw.randrange(len(fleet.urls)))
        tally.kills += 1


async def run_fakes(num_replicas: int, num_requests: int, num_kills: int, seed: int = 0) -> PoolTally:
    tally = PoolTally()
    before = count_descriptors()
    async with fake_fleet(num_replicas) as fleet, Pool(lambda: fleet.urls, timeout=SECONDS, refresh=0.05) as pool:
        await until(lambda: all(each.is_connected for each in pool.replicas))
        killing = asyncio.create_task(replace_fakes(fleet, tally, num_requests, num_kills, seed))
        await ask_fakes(pool, num_requests, tally)
        await killing
        tally.late = pool.num_late
    tally.descriptors = before, count_descriptors()
    return tally


async def run_one_fake(num_requests: int) -> PoolTally:
    """The same load by a plain client of one replica, to compare with."""
    tally = PoolTally()
    async with fake_fleet(1) as fleet, Client(fleet.urls[0], timeout=SECONDS) as client:
        await ask_fakes(client, num_requests, tally)
    return tally


# ---- real servers


class KilledServers:
    """Servers on simulated ranks. urls: of those that run."""

    def __init__(self, folder: Path, draw: random.Random) -> None:
        self._folder = folder
        self._draw = draw
        self._servers: dict[str, Serving] = {}
        self._num_started = 0

    @property
    def urls(self) -> list[str]:
        return list(self._servers)

    async def start(self) -> None:
        url = f"tcp://127.0.0.1:{free_port()}"
        folder = self._folder / str(self._num_started)
        self._num_started += 1
        folder.mkdir()
        self._servers[url] = await asyncio.to_thread(Serving, folder, *SIMULATED, f"zmq.bind={url}")

    async def replace(self) -> None:
        """Kill all processes of a server at once, and start another one."""
        url = self._draw.choice(self.urls)
        server = self._servers[url]
        server.signal_group(signal.SIGKILL)
        await asyncio.to_thread(server.kill)
        del self._servers[url]
        await self.start()

    async def close(self) -> None:
        await asyncio.gather(*(asyncio.to_thread(server.kill) for server in self._servers.values()))


async def run_servers(
    folder: Path, num_requests: int, num_kills: int, seed: int = 0, say: Callable[[str], object] = str
) -> PoolTally:
    """Three servers, of which so many are killed and replaced, each when a third of its share of requests has ended.

    A simulated rank draws tokens by seed and position alone, so a repeated request has the right tokens only if it has
    the same seed.
    """
    tally, draw = PoolTally(), random.Random(seed)
    async with AsyncExitStack() as stack:
        servers = KilledServers(folder, draw)
        stack.push_async_callback(servers.close)
        await asyncio.gather(*(servers.start() for _ in range(3)))
        pool = await stack.enter_async_context(Pool(lambda: servers.urls, timeout=SECONDS, refresh=0.2))
        fields = {"max_tokens": 20, "ignore_eos": True, "text": False}
        right = [
            result.samples[0].token_ids.tolist()
            for result in await pool.generate_many([[1, 2]] * 100, seeds=range(100), **fields)  # type: ignore[arg-type]
        ]
        assert len({tuple(each) for each in right}) == 100

        async def ask(number: int) -> None:
            seed, tokens = number % 100, list[int]()
            try:
                if number % STREAMED:
                    result = await pool.generate([number % 500, 2], seed=seed, **fields)  # type: ignore[arg-type]
                    tokens = result.samples[0].token_ids.tolist()
                else:
                    async for event in pool.stream([number % 500, 2], seed=seed, **fields):  # type: ignore[arg-type]
                        tokens += event.token_ids.tolist()
                tally.wrong += tokens != right[seed]
            except ReplicaLostError:
                tally.broken += 1
                tally.wrong += not tokens or number % STREAMED != 0
            tally.ends += 1

        began, size = time.perf_counter(), num_requests // num_kills
        for number in range(num_kills):
            asked = asyncio.gather(*(ask(each) for each in range(number * size, number * size + size)))
            await until(lambda: tally.ends >= number * size + size // 3)  # noqa: B023
            await servers.replace()
            tally.kills += 1
            await asked
            say(f"{tally.kills} kills, {tally.ends} of {num_requests} requests have ended")
        tally.seconds = time.perf_counter() - began
        tally.late = pool.num_late
    return tally
