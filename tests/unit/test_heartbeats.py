from __future__ import annotations

import pytest

from tests.fakes.clock import Clock
from toka_async.heartbeats import NUM_BEATS, SILENT_BEATS, Heartbeats


def ask(beats: Heartbeats, clock: Clock, *names: str) -> None:
    clock.now += 1.0
    assert beats.take_due()
    for name in names:
        beats.note_asked(name)


def test_who_does_not_answer_is_silent_and_then_hangs() -> None:
    clock = Clock()
    beats = Heartbeats(NUM_BEATS * 1.0, clock)
    for count in range(1, NUM_BEATS + 1):
        ask(beats, clock, "a", "b")
        beats.note_answered("b")
        assert beats.find_silent() == (("a",) if count >= SILENT_BEATS else ())
        assert beats.hangs("a") == (count == NUM_BEATS)
        assert not beats.hangs("b")
    beats.note_answered("a")
    assert not beats.hangs("a")
    assert beats.find_silent() == ()


def test_who_is_gone_is_forgotten() -> None:
    clock = Clock()
    beats = Heartbeats(NUM_BEATS * 1.0, clock)
    for _ in range(NUM_BEATS):
        ask(beats, clock, "a")
    beats.forget("a")
    beats.forget("never asked")
    beats.note_answered("a")  # what it said before it was killed
    assert beats.find_silent() == ()
    assert not beats.hangs("a")


@pytest.mark.parametrize("jump", [3600.0, 1e9])
def test_time_that_the_asker_slept_through_counts_once(jump: float) -> None:
    clock = Clock()
    beats = Heartbeats(NUM_BEATS * 1.0, clock)
    ask(beats, clock, "a")
    clock.now += jump
    assert beats.time_until_due() == 0
    assert beats.take_due()
    assert not beats.hangs("a")
    beats.note_asked("a")
    assert not beats.take_due()
    assert beats.time_until_due() == 1.0


def test_nobody_is_asked_without_a_timeout() -> None:
    clock = Clock()
    beats = Heartbeats(0.0, clock)
    clock.now += 1e6
    assert beats.time_until_due() is None
    assert not beats.take_due()
