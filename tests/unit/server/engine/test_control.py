"""Control of an engine whose schedulers a test steps by hand."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from tests.cases.requests import make_prompt, make_requests, run_group
from tests.fakes.scheduler import READY, FakeScheduler
from toka_async.messages import Reason
from toka_async.server.engine.control import ControlError, ControlTimeoutError, EngineControl
from toka_async.server.engine.engine import Engine

PROMPT = make_prompt()


def make_engine(num_replicas: int = 1, held: bool = False) -> tuple[Engine, list[FakeScheduler]]:
    schedulers = [FakeScheduler(ready=replace(READY, replica=index), held=held) for index in range(num_replicas)]
    engine = Engine(schedulers, max_requests=8)
    for scheduler in schedulers:
        scheduler.start(engine.on_messages)
    return engine, schedulers


async def test_a_pause_that_aborts_ends_requests_on_all_replicas() -> None:
    engine, _ = make_engine(2)
    async with run_group(engine, make_requests(PROMPT, PROMPT[:-1], n=2, max_tokens=400)) as group:
        await asyncio.wait_for(engine.control.pause(), 60)
        assert engine.control.weight_version == "default"
        block = await asyncio.wait_for(group.finished(), 60)
        assert set(block.reasons.tolist()) == {Reason.ABORT}
    async with run_group(engine, make_requests(PROMPT, max_tokens=3)) as group:
        assert engine.num_requests == 1
        await engine.control.resume()
        assert not engine.control.is_paused
        assert len((await asyncio.wait_for(group.finished(), 60)).tokens) == 3


async def test_requests_are_aborted_by_name() -> None:
    engine, _ = make_engine(2)
    async with (
        run_group(engine, make_requests(PROMPT, PROMPT[:-1], max_tokens=400)) as group,
        run_group(engine, make_requests(PROMPT, max_tokens=5)) as other,
    ):
        with engine.control.named(["cmpl-1", "mine"], group), engine.control.named(["mine"], other):
            await engine.control.pause("keep")
            assert await engine.control.abort(["cmpl-1", "unknown"]) == 2
            assert set((await group.finished()).reasons.tolist()) == {Reason.ABORT}
            assert await engine.control.abort(["cmpl-1"]) == 0
            await engine.control.resume()
            assert set((await other.finished()).reasons.tolist()) == {Reason.LENGTH}
        assert await engine.control.abort(["mine"]) == 0


async def test_what_fails_on_one_replica_has_failed() -> None:
    engine, (_, second) = make_engine(2)
    second.control_error = "rank 0 is out of luck"
    with pytest.raises(ControlError, match="rank 0 is out of luck"):
        await engine.control.reset_prefix_cache()
    second.control_error = ""
    await engine.control.reset_prefix_cache()


async def test_a_replica_that_dies_has_failed_and_returns_paused() -> None:
    engine, (_, second) = make_engine(2, held=True)
    task = asyncio.create_task(engine.control.pause("keep"))
    await asyncio.sleep(0)
    engine.lose(1, 1, "killed", second)
    _.step()
    with pytest.raises(ControlError, match="replica 1 has stopped: killed"):
        await task
    assert engine.control.is_paused
    engine.on_messages([replace(READY, replica=1, life=1)])
    second.step()
    assert second.paused == "keep"


async def test_nothing_waits_longer_than_its_time_out() -> None:
    engine, _ = make_engine(held=True)
    control = EngineControl(engine.replicas, engine.requests, timeout=0.01)
    with pytest.raises(ControlTimeoutError, match=r"ResetPrefixCache: no answer from replica 0 within 0.01 s"):
        await control.reset_prefix_cache()
    with pytest.raises(ControlError, match="no replica"):
        await Engine([FakeScheduler()], 1).control.resume()
