"""Waits for what no event announces, like the state of another process. The deadlines only end tests that hang."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

Found = TypeVar("Found")

SECONDS = 60.0


async def until(find: Callable[[], Found | None]) -> Found:
    """What `find` returns once that is true. The loop runs meanwhile."""
    async with asyncio.timeout(SECONDS):
        while not (found := find()):
            await asyncio.sleep(0.002)
    return found


async def until_async(find: Callable[[], Awaitable[Found | None]]) -> Found:
    """As `until`, for what has to be awaited."""
    async with asyncio.timeout(SECONDS):
        while not (found := await find()):
            await asyncio.sleep(0.002)
    return found


def wait_until(
    find: Callable[[], Found | None], tell: Callable[[], object] = lambda: "", seconds: float = SECONDS
) -> Found:
    """What `find` returns once that is true. A failure shows what `tell` returns."""
    deadline = time.monotonic() + seconds
    while not (found := find()):
        assert time.monotonic() < deadline, tell()
        time.sleep(0.01)
    return found


async def turns(count: int = 4) -> None:
    """Lets what is scheduled run."""
    for _ in range(count):
        await asyncio.sleep(0)
