"""Work on thousands of things a slice at a time, so that others have their turns of the event loop. Knows no work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import TypeVar

T = TypeVar("T")
SLICE = 256  # things of some microseconds each


async def in_slices(items: Iterable[T]) -> AsyncIterator[T]:
    """The items; after every SLICE of them, a turn of the event loop."""
    for number, item in enumerate(items, 1):
        yield item
        if number % SLICE == 0:
            await asyncio.sleep(0)
