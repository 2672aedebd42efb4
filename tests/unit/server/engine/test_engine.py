"""The engine client alone, on a scheduler that a test steps by hand."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from tests.fakes.scheduler import READY, FakeScheduler
from toka_async.arrays import i32_column
from toka_async.messages import Cancel, EndSample, Reason, SamplingParams, Submit, Tokens
from toka_async.server.engine import inflight
from toka_async.server.engine.engine import Engine
from toka_async.server.engine.inflight import EngineStoppedError, RequestGroup
from toka_async.server.engine.rows import TokenBlock, token_rows
from toka_async.server.limits.jobs import EngineRequest, NotServingError, OverloadedError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def job(n: int = 1, max_tokens: int = 3, stream: bool = False, prompt: int = 4) -> EngineRequest:
    return EngineRequest(
        prompt=np.arange(prompt, dtype=np.int32),
        n=n,
        max_tokens=max_tokens,
        seed=1,
        sampling=SamplingParams(),
        stream=stream,
        priority=0,
    )


@pytest.fixture
def scheduler() -> FakeScheduler:
    return FakeScheduler(held=True)


@pytest.fixture
def engine(scheduler: FakeScheduler) -> Engine:
    made = Engine([scheduler], max_requests=3, clock=Clock())
    scheduler.start(made.on_messages)
    return made


def tokens_of(batch: RequestGroup) -> list[list[int]]:
    return [sample.take().token_ids.tolist() for flight in batch.flights for sample in flight.samples]


async def test_whole_samples(engine: Engine, scheduler: FakeScheduler) -> None:
    with engine.submitted([job(n=2), job(max_tokens=5)]) as batch:
        waiting = asyncio.create_task(batch.finished())
        for _ in range(4):
            scheduler.step()
            await asyncio.sleep(0)
            assert not waiting.done()
        assert engine.num_requests == 1
        scheduler.step()
        await waiting
        assert [len(ids) for ids in tokens_of(batch)] == [3, 3, 5]
        assert [flight.samples[0].reason for flight in batch.flights] == [Reason.LENGTH] * 2
        assert engine.busy
    await asyncio.wait_for(engine.wait_idle(), 60)
    assert [type(message) for message in scheduler.log] == [Submit, Submit]


async def test_news_of_a_stream(engine: Engine, scheduler: FakeScheduler) -> None:
    with engine.submitted([job(n=2, stream=True)]) as batch:
        scheduler.step()
        assert [(flight.index, sample) for flight, sample in await batch.news()] == [(0, 0), (0, 1)]
        assert [len(ids) for ids in tokens_of(batch)] == [1, 1]
        scheduler.step()
        scheduler.step()
        assert len(await batch.news()) == 2
        assert [len(ids) for ids in tokens_of(batch)] == [2, 2]


async def test_much_news_comes_in_parts(engine: Engine) -> None:
    """A slow client's stream keeps nobody waiting for long."""
    with engine.submitted([job(n=8, stream=True)]) as batch:
        (flight,) = batch.flights
        rows, most = token_rows(np.zeros(inflight.MOST_TOKENS // 2, np.int32)), 2
        for sample in range(8):
            flight.add(sample, rows, Reason.NONE)
        turns: list[int] = []
        asyncio.get_running_loop().call_soon(turns.append, 1)
        for first in range(0, 8, most):
            assert [sample for _, sample in await batch.news()] == [first, first + 1]
            assert turns
            turns.clear()
            asyncio.get_running_loop().call_soon(turns.append, 1)
            flight.add(7, rows, Reason.NONE)  # noted once as long as it was not taken
        assert [sample for _, sample in await batch.news()] == [7]


async def test_much_news_of_blocks_comes_in_parts(engine: Engine) -> None:
    with engine.submitted([replace(job(n=2, stream=True), in_blocks=True)]) as batch:
        (flight,) = batch.flights
        size = inflight.BLOCK_TOKENS // 2
        for reason in (0, 0, 0, 1):
            counts, reasons = np.array([size, 1], np.int32), np.array([reason, 0], np.int32)
            ids = np.zeros(size + 1, np.int32)
            flight.add_block(
                TokenBlock(np.arange(2, dtype=np.int32), counts, ids, reasons, np.zeros(size + 1, np.float32))
            )
        for _ in range(2):
            assert await batch.news() == [(flight, 0)]
            assert flight.take_news().counts.tolist() == [2 * size, 2]
        assert flight.num_open == 1
        assert not flight.num_waiting(0)


async def test_a_stop_string_is_told_once(engine: Engine, scheduler: FakeScheduler) -> None:
    with engine.submitted([job(stream=True, max_tokens=9)]) as batch:
        scheduler.step()
        (flight,) = batch.flights
        engine.end_sample(flight, 0, 1)
        engine.end_sample(flight, 0, 1)
        flight.samples[0].take()
        scheduler.step()
        assert len(flight.samples[0].take()) == 0
        assert engine.num_requests == 0
        engine.end_sample(flight, 0, 1)
    assert [type(message) for message in scheduler.log] == [Submit, EndSample]


async def test_leaving_with_an_error_cancels(engine: Engine, scheduler: FakeScheduler) -> None:
    def leave() -> None:
        with engine.submitted([job(), job(max_tokens=1)]):
            scheduler.step()  # the second has ended
            raise RuntimeError

    with pytest.raises(RuntimeError):
        leave()
    scheduler.step()
    assert [message.request_id for message in scheduler.log if isinstance(message, Cancel)] == [0]
    assert not scheduler.requests
    await asyncio.wait_for(engine.wait_idle(), 60)


async def test_leaving_early_without_an_error_lets_it_run(engine: Engine, scheduler: FakeScheduler) -> None:
    with engine.submitted([job()]):
        pass
    assert engine.busy
    for _ in range(3):
        scheduler.step()
    assert not engine.busy


async def test_all_or_none(engine: Engine, scheduler: FakeScheduler) -> None:
    with pytest.raises(OverloadedError), engine.submitted([job()] * 4):
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
        with engine.submitted([job(), job()]) as batch:
            await batch.finished()

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    engine.fail_all("rank 0 died")
    with pytest.raises(EngineStoppedError, match="rank 0 died"):
        await waiting
    scheduler.step()
    assert not any(isinstance(message, Cancel) for message in scheduler.log)
    assert not engine.busy


async def test_it_says_when_it_gets_busy(engine: Engine, scheduler: FakeScheduler) -> None:
    calls = []
    engine.on_busy = lambda: calls.append(engine.num_requests)
    for _ in range(2):
        with engine.submitted([job(max_tokens=1)]), engine.submitted([job(max_tokens=1)]):
            scheduler.step()
    assert calls == [0, 0]


async def test_latencies(scheduler: FakeScheduler) -> None:
    clock = Clock()
    engine = Engine([scheduler], 3, clock=clock)
    scheduler.start(engine.on_messages)
    with engine.submitted([job(stream=True)]):
        for now in (2.0, 2.5, 3.5):
            clock.now = now
            scheduler.step()
    value = engine.metrics.registry.get_sample_value
    assert value("toka:time_to_first_token_seconds_sum") == 2.0
    assert value("toka:e2e_request_latency_seconds_sum") == 3.5
    assert value("toka:prompt_tokens_total") == 4


async def test_time_with_requests_is_busy_time(scheduler: FakeScheduler) -> None:
    clock = Clock()
    engine = Engine([scheduler], 3, clock=clock)
    scheduler.start(engine.on_messages)
    for begin, end in ((1.0, 1.5), (10.0, 12.0)):
        clock.now = begin
        with engine.submitted([job(max_tokens=1)]):
            clock.now = end
            scheduler.step()
        assert not engine.busy
    assert engine.busy_seconds == 2.5
    with engine.submitted([job(max_tokens=1)]):
        clock.now = 13.0
        assert engine.busy_seconds == 3.5
        scheduler.step()


async def test_a_row_after_the_end_is_a_bug(engine: Engine, scheduler: FakeScheduler) -> None:
    with engine.submitted([job(n=2)]) as batch:
        scheduler.step()
        row = Tokens(
            request_ids=i32_column([0, 0]),
            samples=i32_column([0, 0]),
            counts=i32_column([0, 0]),
            reasons=i32_column([2, 2]),
            token_ids=memoryview(b""),
        )
        with pytest.raises(AssertionError, match="goes on after its end"):
            engine.on_messages([row])
        assert batch.flights[0].num_open == 1
        scheduler.requests.clear()
        engine.fail_all("the test is over")
