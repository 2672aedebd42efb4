"""Pauses of a core: what becomes of requests, and when a pause is complete."""

from __future__ import annotations

import pytest

from tests.drivers.page_rank import submit
from tests.drivers.small_core import SmallCore, got, wanted
from toka_async.control import AbandonUpdate, BeginUpdate, Pause, PauseMode, ResetPrefixCache, Resume
from toka_async.messages import Reason

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def start(core: SmallCore, count: int = 2, num_turns: int = 4) -> None:
    """Requests that are running, with steps queued ahead."""
    for i in range(count):
        core.submit(submit(i, [*PROMPT, i], max_tokens=12))
    for _ in range(num_turns):
        core.turn()
    core.build()


@pytest.mark.parametrize("mode", ["keep", "retract"])
def test_rows_go_on_after_a_pause_as_if_there_had_been_none(mode: PauseMode) -> None:
    core = SmallCore()
    start(core)
    number = core.control(Pause(mode=mode))
    assert number not in core.done  # steps are queued
    while core.turn():
        pass
    assert core.done[number].error == ""
    assert not any(each.ended for each in core.received.values())
    late = core.submit(submit(2, PROMPT, max_tokens=3))
    assert not core.turn()
    core.control(Resume())
    core.drain()
    assert all(got(each) == wanted(each) for each in core.received.values())
    assert (core.stats.recomputed_tokens > 0) == (mode == "retract")
    assert late.samples[0].reason == Reason.LENGTH


def test_a_pause_can_wait_for_what_has_begun() -> None:
    core = SmallCore(max_seqs=2)
    start(core, count=4)
    number = core.control(Pause(mode="wait"))
    late = core.submit(submit(4, PROMPT, max_tokens=3))
    while core.turn():
        assert (number in core.done) == (core.received[0].ended and core.received[1].ended and not core.queued)
    assert number in core.done
    assert [core.received[i].ended for i in range(4)] == [True, True, False, False]
    core.cancel(3)
    core.control(Resume())
    core.drain()
    assert all(got(core.received[i]) == wanted(core.received[i]) for i in (0, 1, 2, 4))
    assert late.ended


def test_nothing_is_computed_after_a_failed_update_within_a_pause_that_waits() -> None:
    """Its tensors may have come in part."""
    core = SmallCore()
    start(core)
    number = core.control(Pause(mode="wait"))
    core.control(BeginUpdate())
    while core.turn():
        pass
    core.control(AbandonUpdate())
    assert not core.turn()
    assert core.done[number].error == "", "nothing is computed any more"
    assert not any(each.ended for each in core.received.values())
    core.control(Resume())
    core.drain()
    assert all(got(each) == wanted(each) for each in core.received.values())


def test_who_waits_for_a_pause_hears_that_the_engine_was_resumed() -> None:
    core = SmallCore()
    start(core)
    number = core.control(Pause(mode="wait"))
    core.control(Resume())
    assert "resumed" in core.done[number].error


def test_a_pause_of_an_idle_core_is_complete_at_once() -> None:
    core = SmallCore()
    assert core.control(Pause(mode="keep")) in core.done


def test_preempted_work_counts_as_begun() -> None:
    core = SmallCore(num_pages=9, page_size=4)
    start(core, count=2)
    core.turn_until(lambda: core.core.take_messages() is None or core.stats.num_preemptions)
    number = core.control(Pause(mode="wait"))
    core.turn_until(lambda: number in core.done)
    assert all(each.ended for each in core.received.values())
    assert all(got(each) == wanted(each) for each in core.received.values())


def test_nothing_is_found_of_prompts_before_a_reset() -> None:
    core = SmallCore()
    core.submit(submit(0, PROMPT, max_tokens=1))
    core.drain()
    running = core.submit(submit(1, PROMPT, max_tokens=12))
    core.turn_until(lambda: running.prefilled is not None)
    assert running.prefilled is not None
    assert running.prefilled.cached_tokens == 8
    core.control(ResetPrefixCache())
    core.core.check()
    other = core.submit(submit(2, PROMPT, max_tokens=12))
    again = core.submit(submit(3, PROMPT, max_tokens=12))
    core.drain()
    assert other.prefilled is not None
    assert other.prefilled.cached_tokens == 0  # though a row still holds the pages
    assert again.prefilled is not None
    assert again.prefilled.cached_tokens == 8
    assert all(got(each) == wanted(each) for each in core.received.values())


def test_a_prompt_that_a_reset_finds_half_computed_is_not_shared() -> None:
    core = SmallCore(max_tokens=8)
    first = core.submit(submit(0, list(range(20)), max_tokens=12))
    core.turn()
    assert first.prefilled is None
    core.control(ResetPrefixCache())
    core.turn_until(lambda: first.prefilled is not None)
    other = core.submit(submit(1, list(range(20)), max_tokens=2))
    core.drain()
    assert other.prefilled is not None
    assert other.prefilled.cached_tokens == 0
