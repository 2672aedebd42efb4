from __future__ import annotations

from toka_async.messages import Stats
from toka_async.procs.step_times import StepTimes


def test_nothing_yet() -> None:
    times = StepTimes()
    times.add(1.0, 0)
    assert times.fill(Stats(num_steps=3)) == Stats(num_steps=3)


def test_turns_without_a_step_count_for_the_next() -> None:
    times = StepTimes()
    times.add(0.001, 0)
    times.add(0.003, 2)
    assert times.fill(Stats()).scheduler_us == (2000.0, 2000.0, 2000.0)


def test_the_newest_count() -> None:
    times = StepTimes(window=4)
    for milliseconds in (50, 1, 2, 3, 4):
        times.add(milliseconds / 1000, 1)
    p50, p99, most = times.fill(Stats()).scheduler_us
    assert (p50, most) == (2500.0, 4000.0)
    assert 3900 < p99 < 4000
