"""The engine client alone, on a scheduler that a test steps by hand."""

from __future__ import annotations

import asyncio

import pytest

from tests.cases.requests import make_prompt, make_requests, run_group, tokens_by_sample
from tests.fakes.scheduler import READY, FakeScheduler
from toka_async.arrays import Int64, i32_column
from toka_async.messages import EndSample, Reason, Submits, Tokens
from toka_async.server.engine.engine import MOST_SUBMITTED, Engine
from toka_async.server.engine.request_group import EngineStoppedError, TimedOutError
from toka_async.server.limits.jobs import NotServingError, OverloadedError

PROMPT = make_prompt()
MANY = 5 * MOST_SUBMITTED


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def scheduler() -> FakeScheduler:
    return FakeScheduler(held=True)


@pytest.fixture
def engine(scheduler: FakeScheduler, clock: Clock) -> Engine:
    made = Engine([scheduler], max_requests=3, clock=clock)
    scheduler.start(made.on_messages)
    return made


async def test_whole_samples(engine: Engine, scheduler: FakeScheduler) -> None:
    async with run_group(engine, make_requests(PROMPT, PROMPT, n=2, max_tokens=[3, 5])) as group:
        waiting = asyncio.create_task(group.finished())
        for _ in range(4):
            scheduler.step()
            await asyncio.sleep(0)
            assert not waiting.done()
        assert engine.num_requests == 1
        scheduler.step()
        block = await waiting
        lengths = {place: len(ids) for place, ids in tokens_by_sample(block).items()}
        assert lengths == {(0, 0): 3, (0, 1): 3, (1, 0): 5, (1, 1): 5}
        assert set(block.reasons.tolist()) == {Reason.LENGTH}
        assert engine.busy
    await asyncio.wait_for(engine.wait_idle(), 60)
    assert [type(message) for message in scheduler.log] == [Submits]


async def test_a_stop_string_is_told_while_the_request_runs(engine: Engine, scheduler: FakeScheduler) -> None:
    async with run_group(engine, make_requests(PROMPT, max_tokens=9, stream=True)) as group:
        scheduler.step()
        (request_id,) = (await group.news(9)).request_ids.tolist()
        engine.requests.end_sample(request_id, 0, 1)
        scheduler.step()
        assert engine.num_requests == 0
        engine.requests.end_sample(request_id, 0, 1)
    assert [type(message) for message in scheduler.log] == [Submits, EndSample]


async def test_leaving_with_an_error_cancels(engine: Engine, scheduler: FakeScheduler) -> None:
    async def leave() -> None:
        async with run_group(engine, make_requests(PROMPT, PROMPT, max_tokens=[3, 1])):
            scheduler.step()  # the second has ended
            raise RuntimeError

    with pytest.raises(RuntimeError):
        await leave()
    scheduler.step()
    assert scheduler.cancelled == [scheduler.submits[0].request_id]
    assert not scheduler.requests
    await asyncio.wait_for(engine.wait_idle(), 60)


async def test_leaving_early_without_an_error_lets_it_run(engine: Engine, scheduler: FakeScheduler) -> None:
    async with run_group(engine, make_requests(PROMPT)):
        pass
    assert engine.busy
    for _ in range(3):
        scheduler.step()
    assert not engine.busy


async def test_all_or_none(engine: Engine, scheduler: FakeScheduler) -> None:
    with pytest.raises(OverloadedError):
        async with run_group(engine, make_requests(*[PROMPT] * 4)):
            pass
    assert not engine.busy
    scheduler.step()
    assert not scheduler.log


async def test_states(scheduler: FakeScheduler) -> None:
    engine = Engine([scheduler], 1)
    with pytest.raises(NotServingError, match="starting"):
        engine.check_serving()
    engine.on_messages([READY])
    assert engine.check_serving() is engine.ready
    engine.begin_drain()
    with pytest.raises(NotServingError, match="shutting down"):
        engine.check_serving()
    engine.fail_all("gone")
    with pytest.raises(NotServingError, match="gone"):
        engine.check_serving()


async def test_the_end_of_the_engine(engine: Engine, scheduler: FakeScheduler) -> None:
    async def wait() -> None:
        async with run_group(engine, make_requests(PROMPT, PROMPT)) as group:
            await group.finished()

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    engine.fail_all("rank 0 died")
    with pytest.raises(EngineStoppedError, match="rank 0 died"):
        await waiting
    scheduler.step()
    assert not scheduler.cancelled
    assert not engine.busy


async def test_it_says_when_it_gets_busy_to_all_who_listen(engine: Engine, scheduler: FakeScheduler) -> None:
    calls: list[str] = []
    engine.on_busy += [lambda: calls.append("one"), lambda: calls.append("two")]
    for _ in range(2):
        requests = make_requests(PROMPT, max_tokens=1)
        async with run_group(engine, requests), run_group(engine, requests):
            scheduler.step()
    assert calls == ["one", "two"] * 2


async def test_latencies(engine: Engine, scheduler: FakeScheduler, clock: Clock) -> None:
    async with run_group(engine, make_requests(PROMPT, stream=True)):
        for now in (2.0, 2.5, 3.5):
            clock.now = now
            scheduler.step()
    value = engine.metrics.registry.get_sample_value
    assert value("toka:time_to_first_token_seconds_sum") == 2.0
    assert value("toka:e2e_request_latency_seconds_sum") == 3.5
    assert value("toka:prompt_tokens_total") == 4


async def test_time_with_requests_is_busy_time(engine: Engine, scheduler: FakeScheduler, clock: Clock) -> None:
    requests = make_requests(PROMPT, max_tokens=1)
    for begin, end in ((1.0, 1.5), (10.0, 12.0)):
        clock.now = begin
        async with run_group(engine, requests):
            clock.now = end
            scheduler.step()
        assert not engine.busy
    assert engine.busy_seconds == 2.5
    async with run_group(engine, requests):
        clock.now = 13.0
        assert engine.busy_seconds == 3.5
        scheduler.step()


async def test_a_row_after_the_end_is_a_bug(engine: Engine, scheduler: FakeScheduler) -> None:
    async with run_group(engine, make_requests(PROMPT)):
        scheduler.step()
        row = Tokens(
            request_ids=i32_column([scheduler.submits[0].request_id] * 2),
            samples=i32_column([0, 0]),
            counts=i32_column([0, 0]),
            reasons=i32_column([2, 2]),
            token_ids=memoryview(b""),
        )
        with pytest.raises(AssertionError, match="goes on after its end"):
            engine.on_messages([row])


# ---- many prompts ----------------------------------------------------------------------------------------------------


class World:
    """An engine that runs one request of many prompts."""

    def __init__(self) -> None:
        self.scheduler = FakeScheduler(held=True)
        self.clock = Clock()
        self.engine = Engine([self.scheduler], max_requests=10 * MANY, clock=self.clock)
        self.scheduler.start(self.engine.on_messages)

    async def run(self) -> Int64:
        """Waits for all prompts, and says how many tokens each of them got."""
        requests = make_requests(*[PROMPT] * MANY, max_tokens=1)
        async with run_group(self.engine, requests, timeout=9.0) as group:
            return (await group.finished()).counts

    async def start(self, num_turns: int) -> asyncio.Task[Int64]:
        """Some of its prompts are submitted."""
        task = asyncio.create_task(self.run())
        for _ in range(num_turns):
            await asyncio.sleep(0)
        return task


@pytest.fixture
def world() -> World:
    return World()


async def test_others_have_turns_while_many_are_submitted(world: World) -> None:
    task = await world.start(1)
    held = [world.engine.num_requests]
    while held[-1] < MANY:
        await asyncio.sleep(0)
        held.append(world.engine.num_requests)
    assert held == [MOST_SUBMITTED * count for count in range(1, 6)]
    world.scheduler.step()
    assert (await task).tolist() == [1] * MANY
    assert not world.engine.busy
    assert not world.scheduler.cancelled


async def test_what_ends_before_the_rest_is_submitted(world: World) -> None:
    task = await world.start(2)
    assert 0 < world.engine.num_requests < MANY
    world.scheduler.step()
    assert world.engine.num_requests == 0
    while not task.done():
        await asyncio.sleep(0)
        world.scheduler.step()
    assert task.result().tolist() == [1] * MANY


@pytest.mark.parametrize(
    ("happens", "error"), [("drain", NotServingError), ("stop", EngineStoppedError), ("late", TimedOutError)]
)
@pytest.mark.parametrize("num_turns", [1, 3])
async def test_what_ends_it_half_way_ends_all_of_it(
    world: World, num_turns: int, happens: str, error: type[Exception]
) -> None:
    task = await world.start(num_turns)
    if happens == "drain":
        world.engine.begin_drain()
    elif happens == "stop":
        world.engine.fail_all("gone")
    else:
        world.clock.now = 9.0
        world.engine.requests.end_late()
    with pytest.raises(error):
        await task
    assert not world.engine.busy
    world.scheduler.step()
    submitted = sorted(submit.request_id for submit in world.scheduler.submits)
    assert sorted(world.scheduler.cancelled) == ([] if happens == "stop" else submitted)
    assert len(submitted) < MANY


@pytest.mark.parametrize("num_turns", [2, 9])
async def test_a_client_that_leaves_cancels_all(world: World, num_turns: int) -> None:
    task = await world.start(num_turns)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    world.scheduler.step()
    assert world.scheduler.cancelled == [submit.request_id for submit in world.scheduler.submits]
    assert not world.engine.busy


async def test_deadlines_count_from_the_arrival(engine: Engine, clock: Clock) -> None:
    async with run_group(engine, make_requests(PROMPT), timeout=3.0, waited=2.0) as group:
        clock.now = 0.9
        engine.requests.end_late()
        assert engine.num_requests == 1
        clock.now = 1.0
        engine.requests.end_late()
        with pytest.raises(TimedOutError, match=r"limits.request_timeout \(3 s\)"):
            await group.finished()
