"""Work on many things, so that the event loop stays free: small jobs from many tasks are done together in a thread,
which shares its switches; work on thousands of things is done a slice at a time. A short job that comes alone is done
at once: to a thread and back would take it longer.

Knows nothing of what is computed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Executor
from time import monotonic
from typing import Generic, TypeVar

A = TypeVar("A")
B = TypeVar("B")

SLICE = 256  # things of some microseconds each
MANY_IDS = 8192  # token ids of a request, which take the event loop about a millisecond
PAUSE = 0.015  # seconds without a job after which one comes alone


async def in_slices(items: Iterable[A]) -> AsyncIterator[A]:
    """The items; after every SLICE of them, a turn of the event loop."""
    for number, item in enumerate(items, 1):
        yield item
        if number % SLICE == 0:
            await asyncio.sleep(0)


class Batcher(Generic[A, B]):
    """Collects items while a batch is being worked on, and at least for one turn of the loop.

    Args:
        work: items to results, in order; runs in `executor`.
        is_short: whether the event loop may do work on these items itself, when they come alone.
    """

    def __init__(
        self,
        work: Callable[[list[A]], list[B]],
        executor: Executor,
        is_short: Callable[[Sequence[A]], bool] = lambda _: False,
    ) -> None:
        self._work = work
        self._executor = executor
        self._is_short = is_short
        self._came = float("-inf")  # when the newest job did
        self._waiting: list[tuple[Sequence[A], asyncio.Future[list[B]]]] = []
        self._task: asyncio.Task[None] | None = None

    async def run(self, items: Sequence[A]) -> list[B]:
        """The results of `items`, in order. Raises what `work` raises for them."""
        before, self._came = self._came, monotonic()
        if self._task is None and self._came - before > PAUSE and self._is_short(items):
            return self._work(list(items))
        future: asyncio.Future[list[B]] = asyncio.get_running_loop().create_future()
        self._waiting.append((items, future))
        if self._task is None:
            self._task = asyncio.create_task(self._run_batches())
        return await future

    async def _run_batches(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                await self._run_batch(batch)
            except Exception as error:
                if len(batch) > 1:  # so that one caller's mistake is not another's
                    for single in batch:
                        await self._run_single(single)
                else:
                    settle(batch[0][1], error)
        self._task = None

    async def _run_single(self, single: tuple[Sequence[A], asyncio.Future[list[B]]]) -> None:
        try:
            await self._run_batch([single])
        except Exception as error:
            settle(single[1], error)

    async def _run_batch(self, batch: Sequence[tuple[Sequence[A], asyncio.Future[list[B]]]]) -> None:
        items = [item for group, _ in batch for item in group]
        results = await asyncio.get_running_loop().run_in_executor(self._executor, self._work, items)
        start = 0
        for group, future in batch:
            if not future.done():  # its task may have been cancelled meanwhile
                future.set_result(results[start : start + len(group)])
            start += len(group)


def settle(future: asyncio.Future[list[B]], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
