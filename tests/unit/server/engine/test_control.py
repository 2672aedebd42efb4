"""Control of an engine whose schedulers a test steps by hand."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import numpy as np
import pytest
from msgspec.structs import replace

from tests.cases.requests import make_prompt, make_requests, run_group
from tests.fakes.scheduler import READY, FakeScheduler
from toka_async.arrays import f32_column
from toka_async.control import Directory, GroupTransfer, PartRows, PartSum, PauseMode
from toka_async.messages import Reason
from toka_async.server.engine.control import ControlError, ControlTimeoutError, EngineControl, add_parts, join_rows
from toka_async.server.engine.engine import Engine
from toka_async.server.limits.jobs import NotServingError

PROMPT = make_prompt()
TRANSFER = GroupTransfer(address="10.0.0.1", port=5000, rank_offset=1, world_size=2)


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
        names: dict[str, int | None] = {"cmpl-1": None, "first": 0, "mine": None}
        with engine.control.named(names, group), engine.control.named({"mine": None}, other):
            await engine.control.pause("keep")
            assert await engine.control.abort(["first"]) == 1
            assert await engine.control.abort(["cmpl-1", "unknown"]) == 1
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


async def step_until_done(scheduler: FakeScheduler, task: asyncio.Task[None]) -> None:
    """Let a held scheduler work until the task is done."""
    while not task.done():
        await asyncio.sleep(0)
        scheduler.step()


async def test_a_pause_that_follows_a_resume_at_once_holds() -> None:
    engine, (scheduler,) = make_engine(held=True)
    resume, pause = (asyncio.create_task(each) for each in (engine.control.resume(), engine.control.pause("keep")))
    await step_until_done(scheduler, pause)
    await resume
    assert (engine.control.is_paused, scheduler.paused) == (True, "keep")


async def test_a_group_without_room_for_all_ranks_is_not_waited_for() -> None:
    engine, (scheduler, _) = make_engine(2)
    with pytest.raises(ControlError, match="rank_offset=1, world_size=2: the engine has 2 ranks"):
        await engine.control.open_transfer(TRANSFER)
    assert scheduler.acts == []


async def test_a_transfer_has_its_own_time_out_and_is_closed_when_it_fails() -> None:
    engine, (scheduler,) = make_engine(held=True)
    with pytest.raises(ControlTimeoutError, match=r"OpenTransfer: no answer from replica 0 within 0.01 s"):
        await engine.control.open_transfer(TRANSFER, timeout=0.01)
    task = asyncio.create_task(engine.control.open_transfer(TRANSFER))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    scheduler.step()
    assert scheduler.acts == ["OpenTransfer", "CloseTransfer"] * 2


# ---- weights

SOURCE = Directory(path="/new")


async def update(engine: Engine, version: str | None = "v1", partial: bool = False) -> None:
    await engine.control.begin_update(partial)
    await engine.control.load(SOURCE)
    await engine.control.finish_update(version)


async def test_an_update_changes_the_version_when_it_is_finished_on_all_replicas() -> None:
    engine, schedulers = make_engine(2)
    control = engine.control
    await control.begin_update()
    with pytest.raises(ControlError, match="open already"):
        await control.begin_update()
    with pytest.raises(ControlError, match="finish or abandon it"):
        await control.resume()
    await control.load(SOURCE)
    assert control.weight_version == "default"
    await control.finish_update("step-7")
    assert (control.weight_version, control.is_paused, control.is_updating) == ("step-7", False, False)
    for scheduler in schedulers:
        assert scheduler.acts == ["BeginUpdate", "LoadTensors", "VerifyUpdate", "CommitUpdate"]
    await update(engine, version=None)
    assert control.weight_version == "step-7"
    await control.set_version("eight")
    assert control.weight_version == "eight"
    with pytest.raises(ControlError, match="no update of the weights is open"):
        await control.load(SOURCE)


@pytest.mark.parametrize("num_written", [0, 1])
async def test_a_failed_update_leaves_the_engine_paused_with_the_old_version(num_written: int) -> None:
    engine, (first, second) = make_engine(2)
    control = engine.control
    await update(engine)
    second.control_error, second.num_written = "x.weight has shape [1]", num_written
    with pytest.raises(ControlError, match=r"x\.weight has shape"):
        await control.begin_update()
    second.control_error = ""
    await control.begin_update()
    second.control_error = "x.weight has shape [1]"
    with pytest.raises(ControlError, match=r"x\.weight has shape"):
        await control.load(SOURCE)
    assert (control.weight_version, control.is_paused, control.is_updating) == ("v1", True, False)
    assert first.paused == second.paused == "keep"
    second.control_error, second.num_written = "", 0
    assert control.is_torn == bool(num_written)
    if num_written:
        for forbidden in (control.resume(), control.pause("wait")):
            with pytest.raises(ControlError, match="left weights of two versions"):
                await forbidden
        with pytest.raises(ControlError, match="update all of them, not some"):
            await control.begin_update(partial=True)
        await update(engine, "v2")
        assert control.is_paused  # the pause is the trainer's to end
    await control.resume()
    assert first.paused is None


async def test_an_update_fails_with_the_replica_that_dies_and_that_one_waits_for_the_next() -> None:
    engine, (first, second) = make_engine(2)
    control = engine.control
    await update(engine)
    await control.begin_update()
    engine.lose(1, 1, "killed", second)
    with pytest.raises(ControlError, match="replica 1 has stopped: killed"):
        await control.load(SOURCE)
    engine.on_messages([replace(READY, replica=1, life=1)])
    assert engine.replicas.live == [0]  # the other one has the weights of its start
    with pytest.raises(NotServingError, match="replica 1 is being restarted: it waits for an update"):
        engine.check_whole()
    second._ready = replace(READY, replica=1, life=1)
    await update(engine, "v2")
    assert engine.replicas.live == [0, 1]
    await control.resume()
    assert (first.paused, second.paused) == (None, None)
    engine.check_whole()


async def test_a_replica_that_was_away_during_the_first_update_waits_for_the_next() -> None:
    engine, (_, second) = make_engine(2)
    engine.lose(1, 1, "killed", second)
    await engine.control.begin_update()
    engine.on_messages([replace(READY, replica=1, life=1)])
    assert engine.replicas.live == [0, 1]  # weights are those of the start everywhere
    await engine.control.load(SOURCE)
    await engine.control.finish_update("v1")
    assert engine.replicas.live == [0]
    assert second.paused is None
    second._ready = replace(READY, replica=1, life=1)
    await update(engine, "v2")
    assert engine.replicas.live == [0, 1]


async def test_an_update_is_given_up_also_when_something_else_is_done_at_that_time() -> None:
    engine, (scheduler,) = make_engine()
    control = EngineControl(engine.replicas, engine.requests, timeout=0.02)
    engine.control = control
    await control.begin_update()
    scheduler.held = True
    with suppress(ControlTimeoutError):
        await control.checksum()
    while control.is_updating:
        await asyncio.sleep(0)
    assert control.is_paused


async def test_an_update_that_nobody_goes_on_with_is_given_up() -> None:
    engine, (scheduler,) = make_engine()
    control = EngineControl(engine.replicas, engine.requests, timeout=0.02)
    engine.control = control
    await control.begin_update()
    while not control.is_paused:
        await asyncio.sleep(0)
    assert scheduler.acts[0] == "BeginUpdate"
    assert not control.is_updating
    assert not control.is_torn
    with pytest.raises(ControlError, match="no update"):
        await control.finish_update()


async def test_a_load_that_is_cancelled_or_takes_too_long_may_have_written() -> None:
    engine, (scheduler,) = make_engine()
    await engine.control.begin_update()
    scheduler.held = True
    task = asyncio.create_task(engine.control.load(SOURCE))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.control.is_torn
    assert engine.control.is_paused


async def begin_two_loads(engine: Engine, scheduler: FakeScheduler) -> list[asyncio.Task[None]]:
    """Begin an update and two loads of it; the scheduler has done none of these."""
    await engine.control.begin_update()
    scheduler.held = True
    loads = [asyncio.create_task(engine.control.load(SOURCE)) for _ in range(2)]
    await asyncio.sleep(0)
    return loads


async def test_a_load_is_sent_while_another_one_is_carried_out_and_the_end_of_the_update_is_not() -> None:
    engine, (scheduler,) = make_engine()
    loads = await begin_two_loads(engine, scheduler)
    finish = asyncio.create_task(engine.control.finish_update("v1"))
    await asyncio.sleep(0)
    scheduler.step()
    assert scheduler.acts == ["BeginUpdate", "LoadTensors", "LoadTensors"]
    await asyncio.gather(*loads)
    await step_until_done(scheduler, finish)
    assert (engine.control.weight_version, engine.control.is_torn) == ("v1", False)


async def test_a_load_behind_one_that_fails_has_torn_the_weights() -> None:
    engine, (scheduler,) = make_engine()
    control = engine.control
    first, second = await begin_two_loads(engine, scheduler)
    scheduler.control_error, scheduler.fails_once = "w is missing", True
    scheduler.step()
    with pytest.raises(ControlError, match="w is missing"):
        await first
    with pytest.raises(ControlError, match="was given up meanwhile"):
        await second
    scheduler.held = False
    assert (control.is_updating, control.is_torn, control.is_paused) == (False, True, True)
    with pytest.raises(ControlError, match="no update of the weights is open"):
        await control.load(SOURCE)
    await update(engine, "v2")
    await control.resume()


async def test_nothing_is_computed_while_a_load_is_left_of_a_failed_update() -> None:
    engine, (scheduler,) = make_engine()
    control = engine.control
    first, second = await begin_two_loads(engine, scheduler)
    first.cancel()
    with suppress(asyncio.CancelledError):
        await first
    control.is_torn = False  # as if it had written nothing
    with pytest.raises(ControlError, match="finish or abandon it first"):
        await control.resume()
    scheduler.step()
    with pytest.raises(ControlError, match="was given up meanwhile"):
        await second


async def test_an_update_that_is_complete_stays_so_when_its_caller_leaves() -> None:
    engine, (scheduler,) = make_engine(held=True)
    control = engine.control
    for step in (control.begin_update(), control.load(SOURCE)):
        await step_until_done(scheduler, asyncio.create_task(step))
    task = asyncio.create_task(control.finish_update("v1"))
    while scheduler.acts[-1] != "VerifyUpdate":
        await asyncio.sleep(0)
        scheduler.step()
    for _ in range(10):  # up to the wait for the answer to the message that commits
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    scheduler.step()
    assert scheduler.acts[-1] == "CommitUpdate"
    assert (control.weight_version, control.is_updating, control.is_paused) == ("v1", False, False)


async def test_an_engine_that_is_updated_does_not_fall_asleep_and_keeps_its_requests() -> None:
    engine, (scheduler,) = make_engine()
    await engine.control.begin_update()
    with pytest.raises(ControlError, match="an update of the weights is open"):
        await engine.control.sleep(1)
    assert scheduler.acts == ["BeginUpdate"]


async def test_requests_are_not_restarted_during_an_update() -> None:
    engine, (scheduler,) = make_engine()
    await engine.control.begin_update()
    with pytest.raises(ControlError, match="an update of the weights is open"):
        await engine.control.restart_requests()
    await engine.control.finish_update("new")
    assert not engine.control.is_paused
    assert scheduler.paused is None


@pytest.mark.parametrize("others", [None, "keep"])
async def test_requests_go_on_when_they_are_restarted_unless_others_have_paused_them(others: PauseMode | None) -> None:
    engine, (scheduler,) = make_engine()
    restarting = asyncio.create_task(engine.control.restart_requests())
    await asyncio.sleep(0)
    if others is not None:
        await engine.control.pause(others)
    await restarting
    assert (engine.control.paused, scheduler.paused) == (others, others)


async def test_checksums_are_those_of_all_replicas() -> None:
    engine, (_, second) = make_engine(2)
    assert await engine.control.checksum() == {"w": f"{5:016x}"}
    second.weights = 6
    with pytest.raises(ControlError, match="replicas have different weights: w"):
        await engine.control.checksum()


def test_sums_of_parts_add_up_and_equal_parts_must_be_equal() -> None:
    parts = [PartSum("a", "0+1", 2**64 - 1), PartSum("a", "1+1", 3), PartSum("a", "0+1", 2**64 - 1)]
    assert add_parts(parts) == {"a": f"{2:016x}"}
    with pytest.raises(ControlError, match="ranks have different weights: a"):
        add_parts([*parts, PartSum("a", "1+1", 4)])


async def test_rows_are_those_of_all_replicas() -> None:
    engine, (_, second) = make_engine(2)
    np.testing.assert_array_equal(await engine.control.read_tensor("w", 2), [[5, 5], [np.nan, np.nan]])
    second.weights = 6
    with pytest.raises(ControlError, match="replicas have different weights: w"):
        await engine.control.read_tensor("w", 2)


def test_parts_are_put_together_and_equal_ones_must_be_equal() -> None:
    def make_part(start: int, *values: float) -> PartRows:
        return PartRows(shape=(1, 3), starts=(0, start), sizes=(1, len(values)), values=f32_column(values))

    parts = [make_part(1, 8, 9), make_part(0, 7), make_part(1, 8, 9)]
    assert join_rows("a", parts).tolist() == [[7, 8, 9]]
    with pytest.raises(ControlError, match="ranks have different weights: a"):
        join_rows("a", [*parts, make_part(0, 8)])


async def test_a_sleeping_engine_cannot_go_on() -> None:
    engine, (scheduler,) = make_engine()
    control = engine.control
    await control.sleep(0)
    assert not control.is_asleep
    await control.sleep(1, "keep")
    assert scheduler.paused == "retract"
    with pytest.raises(ControlError, match="wake it first"):
        await control.resume()
    await control.begin_update()  # weights stay while it sleeps
    await control.finish_update()
    with pytest.raises(ControlError, match="levels are 0"):
        await control.sleep(2)
    await control.wake()
    await control.resume()
    acts = ["Pause", "Pause", "Sleep", "BeginUpdate", "VerifyUpdate", "CommitUpdate", "Wake", "Resume"]
    assert scheduler.acts == acts
    scheduler.control_error, scheduler.failing_act = "the memory stays", "Sleep"
    with pytest.raises(ControlError, match="the memory stays"):
        await control.sleep(1)
    assert not control.is_asleep
