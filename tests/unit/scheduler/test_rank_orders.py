"""Orders of ranks by a core: they are sent when no step is queued, and hold back the next ones."""

from __future__ import annotations

import pytest

from tests.drivers.page_rank import submit
from tests.drivers.small_core import SmallCore, got, wanted
from toka_async.arrays import f32_column
from toka_async.control import (
    AbandonUpdate,
    BeginUpdate,
    Checksum,
    CommitUpdate,
    ControlDone,
    PartRows,
    PartSum,
    Pause,
    PauseMode,
    Resume,
    Sleep,
)
from toka_async.messages import Reason
from toka_async.scheduler.rank_orders import RankOrders

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def test_an_order_waits_for_the_steps_that_are_queued_and_steps_for_the_order() -> None:
    core = SmallCore()
    received = core.submit(submit(0, PROMPT, max_tokens=12))
    core.turn()
    core.build()
    assert core.queued
    number = core.control(Checksum())
    while core.queued:
        assert core.core.next_order() is None
        core.complete()
    assert not list(core.core.next_steps(0.0))
    core.obey()
    assert number in core.done
    core.drain()
    assert got(received) == wanted(received)


def test_no_step_is_built_during_an_update_and_new_prompts_find_nothing_after_it() -> None:
    core = SmallCore()
    core.submit(submit(0, PROMPT, max_tokens=2))
    core.drain()
    core.control(BeginUpdate())
    core.obey()
    late = core.submit(submit(1, PROMPT, max_tokens=2))
    assert not core.turn()
    core.control(CommitUpdate(version="v1"))
    assert core.core._running.log.version == "v1"
    core.drain()
    assert late.prefilled is not None
    assert late.prefilled.cached_tokens == 0


@pytest.mark.parametrize("mode", ["keep", "retract"])
@pytest.mark.parametrize("stream", [False, True])
def test_tokens_are_of_the_version_that_was_there_when_they_were_computed(mode: PauseMode, stream: bool) -> None:
    core = SmallCore()
    received = [core.submit(submit(i, [*PROMPT, i], max_tokens=12, stream=stream)) for i in range(2)]
    for _ in range(4):
        core.turn()
    core.control(Pause(mode=mode))
    while core.turn():
        pass
    core.control(BeginUpdate())
    core.obey()
    core.control(CommitUpdate(version="v1"))
    core.control(Resume())
    late = core.submit(submit(2, PROMPT, max_tokens=3))
    core.drain()
    for each in received:
        (sample,) = each.samples
        assert len(sample.versions) == len(sample.token_ids) == 12
        before = sample.versions.count("default")
        assert 0 < before < 12
        assert sample.versions == ["default"] * before + ["v1"] * (12 - before)
    assert late.samples[0].versions == ["v1"] * 3


def test_a_failed_update_is_a_pause() -> None:
    core = SmallCore()
    core.control(BeginUpdate())
    core.obey()
    core.control(AbandonUpdate())
    core.obey()  # ranks let go of the trainer's memory
    late = core.submit(submit(1, PROMPT, max_tokens=2))
    assert not core.turn()
    core.control(Resume())
    core.drain()
    assert late.samples[0].reason == Reason.LENGTH


def test_a_cache_that_slept_has_nothing() -> None:
    core = SmallCore()
    core.submit(submit(0, PROMPT, max_tokens=2))
    core.drain()
    core.control(Sleep())
    core.obey()
    core.pages.pages[:] = -1
    again = core.submit(submit(1, PROMPT, max_tokens=2))
    core.drain()
    assert got(again) == wanted(again)


def test_answers_of_all_ranks_are_one() -> None:
    orders = RankOrders(2)
    core = SmallCore()
    assert orders.take() is None
    core.control(Checksum())
    first = core.core.next_order()
    assert first is not None
    orders.add(first)
    orders.add(first)
    assert orders.take() is first
    assert orders.take() is None
    a, b = PartSum("a", "0+1", 1), PartSum("a", "1+1", 2)
    rows = (PartRows(shape=(2,), starts=(0,), sizes=(1,), values=f32_column([3])),)
    assert orders.complete(ControlDone(number=1, rank=1, error="no", count=3, sums=(a,), rows=rows)) is None
    done = orders.complete(ControlDone(number=1, rank=0, error="no", count=2, sums=(b,), rows=rows))
    assert done == ControlDone(number=1, error="no", count=3, sums=(a, b), rows=rows * 2)
    assert orders.is_busy
    assert orders.take() is first
