"""How much batch work is in the engine."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from toka_async.batches.window import MIN_WAITING, EngineLoad, Window, next_size


@pytest.mark.parametrize(
    ("load", "in_flight", "size"),
    [
        (EngineLoad(256), 0, 320),  # nothing is there yet: all rows, and some behind
        (EngineLoad(256, running=100, waiting=10), 0, 210),  # but for what others have
        (EngineLoad(256, running=256, waiting=64), 320, 320),  # as it should be
        (EngineLoad(256, running=256, waiting=0), 320, 384),  # the queue has run dry
        (EngineLoad(256, running=256, waiting=264), 320, 120),  # others fill it
        (EngineLoad(256, running=10, waiting=2000), 100, 1),
        (EngineLoad(8192, running=8192, waiting=0), 8192, 10240),  # a quarter of what runs
        (EngineLoad(8192, running=100, waiting=0), 100, 264),  # free rows, by doubling
        (EngineLoad(8192, running=100, waiting=100), 200, 164),  # rows are free, but the cache is full
        (EngineLoad(256, running=256, waiting=0), 5000, 576),  # twice the rows
        (EngineLoad(8192, running=8000, waiting=0), 10000, 11000),  # the limit
        (EngineLoad(0), 10, 0),  # nobody is there
    ],
)
def test_the_size_follows_the_queues(load: EngineLoad, in_flight: int, size: int) -> None:
    assert next_size(load, in_flight, 11_000) == size


async def test_lines_wait_for_room_in_their_order() -> None:
    window, entered = Window(100), []

    async def line(number: int, cost: int) -> None:
        await window.enter("", cost)
        entered.append(number)

    tasks = [asyncio.create_task(line(number, 30)) for number in range(6)]
    await asyncio.sleep(0)
    assert not entered  # nobody has said what the engine can take
    window.report(EngineLoad(4))
    await asyncio.sleep(0.01)
    assert window.size == 4 + MIN_WAITING
    assert entered == [0, 1, 2]  # the last exceeds it
    tasks[3].cancel()
    window.leave(30)
    await asyncio.sleep(0.01)
    assert entered == [0, 1, 2, 4]
    window.leave(90)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert entered == [0, 1, 2, 4, 5]
    assert window.in_flight == 30


async def test_owners_take_turns() -> None:
    window, entered = Window(100), []

    async def line(owner: str) -> None:
        await window.enter(owner, 100)
        entered.append(owner)

    tasks = [asyncio.create_task(line(owner)) for owner in "aaaabb"]
    await asyncio.sleep(0)
    window.report(EngineLoad(4))
    for task in ("a", "b", "a", "b", "a", "a"):
        while not entered:
            await asyncio.sleep(0)
        assert entered.pop() == task
        assert not entered
        window.leave(100)
    await asyncio.gather(*tasks)


async def test_a_line_that_is_cancelled_as_it_enters_leaves() -> None:
    window = Window(100)
    task = asyncio.create_task(window.enter("", 30))
    await asyncio.sleep(0)
    window.report(EngineLoad(4))
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert window.in_flight == 0


async def test_who_must_try_later_waits_for_an_engine_that_takes_requests() -> None:
    window = Window(100)
    waiting = asyncio.create_task(window.changed())
    await asyncio.sleep(0)
    window.report(EngineLoad(0))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    window.report(EngineLoad(4))
    await waiting
