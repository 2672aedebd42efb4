"""Minutes of randomised load against a running server, every answer checked: nothing may fail, nothing be compiled.

    toka-async serve model.path=/models/llama
    python scripts/mixed_load.py --url http://127.0.0.1:10210 --minutes 8 --seed 1

Bursts of hundreds of requests, steady streams of them, single users, quiet seconds; clients that leave. Prints counts
at the end, and exits with 1 when an answer was wrong, a status was not the expected one, something was compiled
(`toka:compiles_total`), or sequences are left once all is over. Knows the HTTP API; what is asked and what must hold is
in `mixed_requests`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

import aiohttp
from mixed_requests import Answer, Body, Requests, Sizes, WrongError, check, log_uniform

from toka_async.listening import raise_limits

LEAVING = 0.08  # share of requests whose client leaves
INVALID = 0.02
WATCH_SECONDS = 3.0
REPORT_SECONDS = 30.0
SETTLE_SECONDS = 30.0  # until a server without requests has nothing left
MOST_SHOWN = 20  # failures
COMPILES = "toka:compiles_total"
LEFT = ("toka:num_requests_running", "toka:num_requests_waiting", "toka:kv_cache_usage_perc")


@dataclass(slots=True)
class Tally:
    """What happened up to now. failures: by message."""

    requests: int = 0
    samples: int = 0
    tokens: int = 0
    cancelled: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)

    def fail(self, message: str, body: Body | None = None) -> None:
        self.failures[message] += 1
        if sum(self.failures.values()) <= MOST_SHOWN:
            asked = {} if body is None else {name: value for name, value in body.items() if name != "prompt"}
            print(f"FAILED: {message}\n  {json.dumps(asked)[:600]}", flush=True)

    def __str__(self) -> str:
        counts = f"{self.requests} requests, {self.samples} samples, {self.tokens} tokens, {self.cancelled} cancelled"
        return f"{counts}, {sum(self.failures.values())} failures"


@dataclass(slots=True)
class Gauges:
    """What the server and the GPU said: the newest counts, the most of each, and the GPU's memory in MiB."""

    newest: dict[str, float] = field(default_factory=dict)
    most: dict[str, float] = field(default_factory=dict)
    gpu: int = 0
    memory: list[int] = field(default_factory=list)

    def take(self, values: dict[str, float]) -> None:
        self.newest = values
        self.most = {name: max(value, self.most.get(name, value)) for name, value in values.items()}
        if (used := read_gpu_memory(self.gpu)) is not None:
            self.memory.append(used)


def read_gpu_memory(gpu: int) -> int | None:
    """Reads the MiB in use on a GPU, as nvidia-smi numbers them; None where there is no nvidia-smi or no such GPU."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--id={gpu}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    return int(lines[0]) if lines and lines[0].isdecimal() else None


class Load:
    """Sends requests of all kinds; `outstanding` tokens at most are asked for at once."""

    def __init__(self, session: aiohttp.ClientSession, options: argparse.Namespace, sizes: Sizes) -> None:
        self.tally = Tally()
        self._session = session
        self._options = options
        self._draw = random.Random(options.seed)
        self._requests = Requests(random.Random(options.seed + 1), sizes)
        self._asked = 0  # tokens of the requests that are under way
        self._room = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Phases until the time is over, then what is still under way."""
        deadline = time.monotonic() + 60 * self._options.minutes
        while time.monotonic() < deadline:
            phase = self._draw.choices([self._burst, self._steady, self._single, self._quiet], weights=[3, 4, 2, 1])[0]
            with suppress(TimeoutError):
                await asyncio.wait_for(phase(), timeout=max(0.01, deadline - time.monotonic()))
        await asyncio.gather(*self._tasks)

    async def _burst(self) -> None:
        """Many requests at once, of few samples."""
        for _ in range(self._draw.randint(self._options.burst // 4, self._options.burst)):
            await self._start(self._requests.body(most_samples=8))

    async def _steady(self) -> None:
        """Requests of all sizes, as fast as there is room, for a while."""
        until = time.monotonic() + self._draw.uniform(5, 20)
        pause = self._draw.choice([0.0, 0.02, 0.2])
        while time.monotonic() < until:
            await self._start(self._requests.invalid() if self._draw.random() < INVALID else self._requests.body())
            await asyncio.sleep(self._draw.expovariate(1) * pause)

    async def _single(self) -> None:
        """One user, one request after the other, alone once the others are through."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=10)
        for _ in range(log_uniform(self._draw, 1, 12)):
            await self._exchange(self._requests.body(most_samples=2))

    async def _quiet(self) -> None:
        await asyncio.sleep(self._draw.uniform(1, 6))

    async def _start(self, body: Body) -> None:
        """Sends a request in the background, once there is room."""
        asked = body.get("n", 1) * body.get("max_tokens", 0)
        async with self._room:
            await self._room.wait_for(lambda: self._asked == 0 or self._asked + asked <= self._options.outstanding)
            self._asked += asked
        task = asyncio.create_task(self._exchange_in_room(body, asked))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _exchange_in_room(self, body: Body, asked: int) -> None:
        try:
            await self._exchange(body)
        finally:
            async with self._room:
                self._asked -= asked
                self._room.notify_all()

    async def _exchange(self, body: Body) -> None:
        """One request; some clients leave after a while."""
        self.tally.requests += 1
        valid = "return_token_ids" in body
        leaves = valid and self._draw.random() < LEAVING
        limit = self._draw.uniform(0, 2) if leaves else self._options.timeout
        try:
            await asyncio.wait_for(self._send(body, valid), timeout=limit)
        except TimeoutError:
            if leaves:
                self.tally.cancelled += 1
            else:
                self.tally.fail(f"no answer in {limit:.0f} s", body)
        except WrongError as error:
            self.tally.fail(str(error), body)
        except (aiohttp.ClientError, OSError) as error:
            self.tally.fail(f"{type(error).__name__}: {error}", body)

    async def _send(self, body: Body, valid: bool) -> None:
        async with self._session.post(f"{self._options.url}/v1/completions", json=body) as response:
            self.tally.statuses[response.status] += 1
            if response.status != (200 if valid else 400):
                raise WrongError(f"status {response.status}: {(await response.text())[:300]}")
            if not valid:
                return
            answer = Answer()
            if body.get("stream"):
                await read_events(response, answer)
            else:
                answer.add(json.loads(await response.read()))
        self.tally.tokens += check(body, answer)
        self.tally.samples += body["n"]


async def read_events(response: aiohttp.ClientResponse, answer: Answer) -> None:
    """Raises WrongError when the stream breaks off."""
    rest = b""
    async for data in response.content.iter_any():
        *events, rest = (rest + data).split(b"\n\n")
        for event in events:
            if event == b"data: [DONE]":
                return
            answer.add(json.loads(event.removeprefix(b"data: ")))
    raise WrongError("a stream broke off")


async def metrics(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Names without labels to values."""
    async with session.get(f"{url}/metrics") as response:
        response.raise_for_status()
        lines = (await response.text()).splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs if "{" not in name}


async def watch(session: aiohttp.ClientSession, url: str, tally: Tally, gauges: Gauges) -> None:
    """Reads the server's counts every few seconds, and says now and then how far it is."""
    began = reported = time.monotonic()
    while True:
        await asyncio.sleep(WATCH_SECONDS)
        try:
            gauges.take(await metrics(session, url))
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            tally.fail(f"/metrics: {type(error).__name__}: {error}")
        if time.monotonic() - reported > REPORT_SECONDS:
            reported = time.monotonic()
            running = gauges.newest.get("toka:num_requests_running", 0)
            print(f"{reported - began:5.0f} s: {tally}; {running:.0f} sequences running", flush=True)


async def settle(session: aiohttp.ClientSession, url: str, tally: Tally, gauges: Gauges) -> None:
    """Without requests there must be no sequences and no pages in use before long."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        gauges.take(await metrics(session, url))
        left = {name: gauges.newest[name] for name in LEFT if gauges.newest.get(name)}
        if not left:
            return
        if time.monotonic() > deadline:
            tally.fail(f"left behind: {left}")
            return
        await asyncio.sleep(1)


async def sizes_of(session: aiohttp.ClientSession, options: argparse.Namespace) -> Sizes:
    """What the served model allows."""
    async with session.get(f"{options.url}/v1/models") as response:
        response.raise_for_status()
        model = (await response.json())["data"][0]
    room = int(model["max_model_len"])
    return Sizes(
        vocab_size=int(model["vocab_size"]),
        room=room,
        prompt=min(options.prompt_tokens, room // 2),
        tokens=min(options.tokens, room // 2),
        samples=options.samples,
    )


def report(tally: Tally, gauges: Gauges, before: dict[str, float], seconds: float) -> None:
    def grown(name: str) -> float:
        return gauges.newest.get(name, 0.0) - before.get(name, 0.0)

    print(f"\n{seconds:.0f} s: {tally}")
    print(f"statuses: {dict(sorted(tally.statuses.items()))}")
    generated = grown("toka:generation_tokens_total")
    print(f"server: {generated:.0f} tokens ({generated / seconds:.0f}/s), {grown('toka:steps_total'):.0f} steps")
    print(f"{COMPILES}: {gauges.newest.get(COMPILES, 0):.0f}")
    print(f"preemptions: {grown('toka:num_preemptions_total'):.0f}")
    most = {name.removeprefix("toka:"): gauges.most.get(name, 0) for name in LEFT}
    print("at most: " + ", ".join(f"{name} {value:g}" for name, value in most.items()))
    if gauges.memory:
        first, last = gauges.memory[0], gauges.memory[-1]
        print(f"GPU memory: {first} MiB first, {last} MiB last, {max(gauges.memory)} MiB at most")
    else:
        print(f"GPU memory: not read; nvidia-smi is missing or shows no GPU {gauges.gpu}")
    for message, count in tally.failures.most_common(MOST_SHOWN):
        print(f"{count:6} x {message}")


async def run(options: argparse.Namespace) -> int:
    """The exit code."""
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=1 << 20) as session:
        load = Load(session, options, await sizes_of(session, options))
        gauges, began = Gauges(gpu=options.gpu), time.monotonic()
        before = await metrics(session, options.url)
        gauges.take(before)
        watching = asyncio.create_task(watch(session, options.url, load.tally, gauges))
        await load.run()
        watching.cancel()
        seconds = time.monotonic() - began
        await settle(session, options.url, load.tally, gauges)
    report(load.tally, gauges, before, seconds)
    return 1 if load.tally.failures or gauges.newest.get(COMPILES) or not load.tally.samples else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:10210")
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gpu", type=int, default=0, help="whose memory is reported, by its number in nvidia-smi")
    parser.add_argument("--prompt-tokens", type=int, default=4000, help="at most")
    parser.add_argument("--tokens", type=int, default=600, help="max_tokens at most")
    parser.add_argument("--samples", type=int, default=256, help="n at most")
    parser.add_argument("--burst", type=int, default=400, help="requests at once at most")
    parser.add_argument("--outstanding", type=int, default=1_000_000, help="tokens asked for at once at most")
    parser.add_argument("--timeout", type=float, default=180, help="seconds that an answer may take")
    raise_limits()
    sys.exit(asyncio.run(run(parser.parse_args())))
