"""Thousands of prompts of one request: others have their turns, and none is left whatever happens in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import pytest

from tests.drivers.web_server import web_server
from tests.fakes.scheduler import FakeScheduler
from toka_async.messages import Cancel, SamplingParams, Submit
from toka_async.server.engine.engine import Engine
from toka_async.server.engine.inflight import EngineStoppedError, RequestGroup, TimedOutError
from toka_async.server.engine.slices import SLICE
from toka_async.server.engine.submitting import submitted_too
from toka_async.server.limits.jobs import EngineRequest, NotServingError

JOB = EngineRequest(
    prompt=np.arange(4, dtype=np.int32),
    n=1,
    max_tokens=1,
    seed=1,
    sampling=SamplingParams(),
    stream=False,
    priority=0,
)
NUM = 5 * SLICE


class World:
    """An engine on a scheduler that a test steps by hand."""

    def __init__(self) -> None:
        self.scheduler = FakeScheduler(held=True)
        self.engine = Engine([self.scheduler], max_requests=10 * NUM)
        self.scheduler.start(self.engine.on_messages)
        self.batch: RequestGroup | None = None

    async def run(self, num: int = NUM, timeout: float = 0.0) -> int:
        """Submits so many, waits for all, and says how many samples have ended."""
        with ExitStack() as stack:
            self.batch = stack.enter_context(self.engine.submitted([JOB] * SLICE, timeout))
            async with submitted_too(self.engine, self.batch, iter([JOB] * (num - SLICE))):
                await self.batch.finished()
                return len(self.batch.flights)

    async def started(self, num_turns: int, timeout: float = 0.0) -> asyncio.Task[int]:
        """Some slices of it are submitted."""
        task = asyncio.create_task(self.run(timeout=timeout))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        return task

    def told(self, kind: type[Submit] | type[Cancel]) -> list[int]:
        """The requests that the scheduler was told so of."""
        for message in self.scheduler._inbox.drain():
            self.scheduler.log.append(message)
        return [message.request_id for message in self.scheduler.log if isinstance(message, kind)]


@pytest.fixture
def world() -> World:
    return World()


async def test_others_have_turns_while_it_is_submitted_and_while_it_ends(world: World) -> None:
    task = await world.started(1)
    held = [world.engine.num_requests]
    while held[-1] < NUM:
        await asyncio.sleep(0)
        held.append(world.engine.num_requests)
    assert held == [SLICE * count for count in range(1, 6)]
    world.scheduler.step()
    assert await task == NUM
    assert not world.engine.busy
    assert world.told(Cancel) == []


async def test_what_ends_before_the_rest_is_submitted(world: World) -> None:
    task = await world.started(2)
    assert 0 < world.engine.num_requests < NUM
    world.scheduler.step()
    assert world.engine.num_requests == 0
    await asyncio.sleep(0)
    assert not task.done()
    while not task.done():
        await asyncio.sleep(0)
        world.scheduler.step()
    assert task.result() == NUM


def drain(world: World) -> None:
    world.engine.begin_drain()


def stop(world: World) -> None:
    world.engine.fail_all("gone")


def time_out(world: World) -> None:
    assert world.batch is not None
    world.engine._time_out(world.batch, 1.0)


@pytest.mark.parametrize(
    ("happens", "error"), [(drain, NotServingError), (stop, EngineStoppedError), (time_out, TimedOutError)]
)
@pytest.mark.parametrize("num_turns", [1, 3])
async def test_what_ends_it_half_way_ends_all_of_it(
    world: World, num_turns: int, happens: Callable[[World], None], error: type[Exception]
) -> None:
    task = await world.started(num_turns)
    happens(world)
    with pytest.raises(error):
        await task
    assert not world.engine.busy
    if happens is not stop:
        assert sorted(world.told(Cancel)) == sorted(world.told(Submit))
    assert len(world.told(Submit)) < NUM


@pytest.mark.parametrize("num_turns", [2, 9])
async def test_a_client_that_leaves_cancels_all_in_turns(world: World, num_turns: int) -> None:
    task = await world.started(num_turns)
    submitted = world.told(Submit)
    task.cancel()
    await asyncio.sleep(0)
    assert len(world.told(Cancel)) <= SLICE
    with pytest.raises(asyncio.CancelledError):
        await task
    assert world.told(Cancel) == submitted == world.told(Submit)
    assert not world.engine.busy


async def test_who_is_cancelled_while_it_cancels_is_through_at_once(world: World) -> None:
    task = await world.started(9)
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(world.told(Cancel)) == world.told(Submit)
    assert not world.engine.busy


@pytest.mark.parametrize("fields", [{}, {"n": 4}, {"stop": ["zzz"]}, {"echo": True}])
async def test_a_request_of_many_prompts(fields: dict[str, object]) -> None:
    """Over HTTP: every choice is there, in order, and others are answered before it is."""
    num = 2 * SLICE + 1
    async with web_server(FakeScheduler(held=True)) as server:
        body = {"prompt": [[1, 2, index % 200] for index in range(num)], "max_tokens": 2, **fields}
        answer = asyncio.create_task(server.ok("/v1/completions", body))
        while server.engine.num_requests < num:
            assert (await server.get("/ping"))[0] == 200
        while not answer.done():
            server.scheduler.step()
            await asyncio.sleep(0.001)
        choices = answer.result()["choices"]
        assert [choice["index"] for choice in choices] == list(range(num * int(str(fields.get("n", 1)))))
        assert not server.engine.busy
