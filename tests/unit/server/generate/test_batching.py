from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from toka_async.server.generate import batching
from toka_async.server.generate.batching import SLICE, Batcher, in_slices


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as made:
        yield made


async def test_many_callers_share_a_batch(executor: ThreadPoolExecutor) -> None:
    batches: list[list[int]] = []

    def double(items: list[int]) -> list[int]:
        batches.append(list(items))
        return [2 * item for item in items]

    batcher = Batcher(double, executor)
    results = await asyncio.gather(*(batcher.run([i, i + 100]) for i in range(5)))
    assert results == [[2 * i, 2 * i + 200] for i in range(5)]
    assert len(batches) == 1
    assert await batcher.run([7]) == [14]
    assert len(batches) == 2


async def test_a_short_job_that_comes_alone_is_done_at_once(
    executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(batching, "monotonic", lambda: now)

    def name_threads(items: list[int]) -> list[str]:
        return [threading.current_thread().name for _ in items]

    batcher = Batcher(name_threads, executor, is_short=lambda items: len(items) < 3)
    own = threading.current_thread().name
    assert await batcher.run([1, 2]) == [own, own]
    assert own not in await batcher.run([1])  # it follows another one
    now += 1.0
    assert own not in await batcher.run([1, 2, 3])
    now += 1.0
    first, second = await asyncio.gather(batcher.run([1]), batcher.run([2]))
    assert first == [own] != second


async def test_a_job_does_not_overtake_those_that_wait(
    executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, gate = 100.0, threading.Event()
    monkeypatch.setattr(batching, "monotonic", lambda: now)

    def wait(items: list[int]) -> list[int]:
        assert gate.wait(60)
        return items

    batcher = Batcher(wait, executor, is_short=lambda items: len(items) == 1)
    long = asyncio.create_task(batcher.run([1, 2]))
    await asyncio.sleep(0)
    now += 1.0
    short = asyncio.create_task(batcher.run([3]))
    await asyncio.sleep(0)
    gate.set()
    assert await long == [1, 2]
    assert await short == [3]


async def test_a_mistake_is_its_own_callers(executor: ThreadPoolExecutor) -> None:
    def invert(items: list[int]) -> list[float]:
        return [1 / item for item in items]

    batcher = Batcher(invert, executor)
    results = await asyncio.gather(*(batcher.run([i]) for i in (1, 0, 2)), return_exceptions=True)
    assert results[0] == [1.0]
    assert isinstance(results[1], ZeroDivisionError)
    assert results[2] == [0.5]
    with pytest.raises(ZeroDivisionError):
        await batcher.run([0])
    assert await batcher.run([4]) == [0.25]


async def test_a_cancelled_caller_hinders_nobody(executor: ThreadPoolExecutor) -> None:
    batcher: Batcher[int, int] = Batcher(list, executor)
    leaves, stays = asyncio.create_task(batcher.run([1])), asyncio.create_task(batcher.run([2]))
    await asyncio.sleep(0)
    leaves.cancel()
    assert await stays == [2]
    with pytest.raises(asyncio.CancelledError):
        await leaves


@pytest.mark.parametrize(("num", "num_turns"), [(0, 0), (SLICE - 1, 0), (SLICE, 1), (5 * SLICE + 1, 5)])
async def test_a_turn_after_every_slice(num: int, num_turns: int) -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    assert [item async for item in in_slices(range(num))] == list(range(num))
    assert turns == num_turns
    task.cancel()
