"""Reads a server's counters from /metrics while a load runs, ours or another server's that counts tokens alike.

Knows no loads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise

import aiohttp

from toka_async.bench.loads.served import BenchError

TOKENS = ":generation_tokens_total"  # the end of the counter's name in vLLM, SGLang and here
OURS = "toka:"
HTTP = "http_"  # the counters of requests over HTTP, without our prefix
INTERVAL = 0.25  # seconds
SETTLE = 5.0  # seconds for the last counts to arrive


@dataclass(slots=True)
class Rates:
    """The tokens generated up to each time, in seconds since the first reading."""

    times: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)

    def per_second(self) -> Iterator[tuple[float, float]]:
        """Yields (middle of an interval, tokens/s in it); readings without new tokens join one interval."""
        seen = [0, *(i for i in range(1, len(self.tokens)) if self.tokens[i] != self.tokens[i - 1])]
        for a, b in pairwise(seen):
            length = self.times[b] - self.times[a]
            yield (self.times[a] + self.times[b]) / 2, (self.tokens[b] - self.tokens[a]) / length


async def counters(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Returns the counters of /metrics by name, summed over labels; nothing without such a page."""
    try:
        async with session.get(f"{url}/metrics") as response:
            text = await response.text() if response.status == 200 else ""
    except (aiohttp.ClientError, OSError):
        return {}
    found: dict[str, float] = {}
    for line in text.splitlines():
        left, _, value = line.rpartition(" ")
        name = left.partition("{")[0]
        if name.endswith("_total") and not line.startswith("#"):
            with suppress(ValueError):
                found[name] = found.get(name, 0.0) + float(value)
    return found


async def wait_for_counters(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Returns the counters once they stand still, or after SETTLE seconds."""
    deadline, last = time.monotonic() + SETTLE, await counters(session, url)
    while last and time.monotonic() < deadline:
        await asyncio.sleep(2 * INTERVAL)
        now = await counters(session, url)
        if _select_engine(now) == _select_engine(last):
            break
        last = now
    return last


def _select_engine(found: dict[str, float]) -> dict[str, float]:
    """Selects counters that stand still without requests: reading the counters is an HTTP request."""
    return {name: value for name, value in select_ours(found).items() if not name.startswith(HTTP)}


def select_ours(found: dict[str, float]) -> dict[str, float]:
    """Selects this engine's own counters, without their prefix."""
    return {name.removeprefix(OURS): value for name, value in found.items() if name.startswith(OURS)}


def sum_generated(found: dict[str, float]) -> float | None:
    """Returns the tokens generated since the server's start; None when it does not say."""
    values = [value for name, value in found.items() if name.endswith(TOKENS)]
    return sum(values) if values else None


@asynccontextmanager
async def watch_rates(session: aiohttp.ClientSession, url: str) -> AsyncIterator[Rates]:
    """Records tokens over time inside the context. Raises BenchError when the server has no such counter."""
    if sum_generated(await counters(session, url)) is None:
        raise BenchError(f"--plot: {url}/metrics does not count generated tokens (a name that ends in {TOKENS!r})")
    rates = Rates()
    task = asyncio.create_task(_watch(session, url, rates))
    try:
        yield rates
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _watch(session: aiohttp.ClientSession, url: str, rates: Rates) -> None:
    began = time.perf_counter()
    while True:
        tokens = sum_generated(await counters(session, url))
        if tokens is not None:
            rates.times.append(time.perf_counter() - began)
            rates.tokens.append(tokens)
        await asyncio.sleep(INTERVAL)
