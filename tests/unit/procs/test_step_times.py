from __future__ import annotations

import pytest

from tests.fakes.clock import Clock
from toka_async.messages import SCHEDULER_STAGES, Stats
from toka_async.procs.step_times import StepTimes


def turn(times: StepTimes, clock: Clock, seconds: float, num_steps: int, stage: str = "steps") -> None:
    times.begin()
    clock.now += seconds
    times.lap(stage)
    times.end(num_steps)
    clock.now += 1.0  # waiting is nobody's time


def test_nothing_yet() -> None:
    assert StepTimes().fill(Stats(num_steps=3)) == Stats(num_steps=3, stage_seconds=(0.0,) * len(SCHEDULER_STAGES))


def test_turns_without_a_step_count_for_the_next() -> None:
    clock = Clock()
    times = StepTimes(clock=clock)
    turn(times, clock, 0.001, 0)
    turn(times, clock, 0.003, 2)
    assert times.fill(Stats()).scheduler_us == (2000.0, 2000.0, 2000.0)


def test_the_newest_count() -> None:
    clock = Clock()
    times = StepTimes(window=4, clock=clock)
    for milliseconds in (50, 1, 2, 3, 4):
        turn(times, clock, milliseconds / 1000, 1)
    p50, p99, most = times.fill(Stats()).scheduler_us
    assert (p50, most) == (2500.0, 4000.0)
    assert 3900 < p99 < 4000


def test_stages_add_up() -> None:
    clock = Clock()
    times = StepTimes(clock=clock)
    turn(times, clock, 0.25, 1, "results")
    turn(times, clock, 0.5, 1, "messages")
    turn(times, clock, 0.25, 1, "results")
    assert times.fill(Stats()).stage_seconds == pytest.approx((0.5, 0.0, 0.0, 0.5))
