"""Waits for what no event announces, like the state of another process. The deadlines only end tests that hang."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")

SECONDS = 60.0


async def until(find: Callable[[], Found]) -> Found:
    """What `find` returns once that is true. The loop runs meanwhile."""
    async with asyncio.timeout(SECONDS):
        while not (found := find()):
            await asyncio.sleep(0.002)
    return found


def wait_until(find: Callable[[], Found], tell: Callable[[], object] = lambda: "") -> Found:
    """What `find` returns once that is true. A failure shows what `tell` returns."""
    deadline = time.monotonic() + SECONDS
    while not (found := find()):
        assert time.monotonic() < deadline, tell()
        time.sleep(0.01)
    return found
