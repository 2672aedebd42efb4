from __future__ import annotations

import pytest

from toka_async.scheduler.depth import EVERY, LEAST, MOST, StepDepth


def run(depth: StepDepth, steps: int, *, step: float, latency: float, wasted: int = 0, queued: int = 1) -> None:
    now = 0.0
    for _ in range(steps):
        now += step
        depth.note_completed(now, step, queued)
        depth.count_tokens(100, wasted)
        depth.note_sent(now + latency, True)


def test_long_steps_need_two() -> None:
    depth = StepDepth()
    run(depth, 4 * EVERY, step=0.040, latency=0.005)
    assert depth.depth == LEAST == 2


def test_short_steps_need_more_and_never_too_many() -> None:
    depth = StepDepth()
    run(depth, 4 * EVERY, step=0.002, latency=0.0045)
    assert depth.depth == 4
    run(depth, 40 * EVERY, step=0.0001, latency=0.02)
    assert depth.depth == MOST


def test_a_rare_long_latency_counts() -> None:
    depth = StepDepth()
    for _ in range(8):
        run(depth, EVERY - 1, step=0.002, latency=0.0001)
        run(depth, 1, step=0.002, latency=0.0075)
    assert depth.depth == 5


def test_waste_takes_depth_back_until_it_is_small() -> None:
    depth = StepDepth()
    run(depth, 8 * EVERY, step=0.002, latency=0.01)
    deep = depth.depth
    assert deep > 4
    run(depth, EVERY, step=0.002, latency=0.01, wasted=5)
    assert depth.depth == deep - 1
    run(depth, 40 * EVERY, step=0.002, latency=0.01, wasted=5)
    assert depth.depth == LEAST
    run(depth, 40 * EVERY, step=0.002, latency=0.01)
    assert depth.depth == deep


def test_a_pipeline_needs_the_next_step_before_the_last_rank_has_this_one() -> None:
    for latency, lag, expected in ((0.005, 7 / 9, 2), (0.020, 7 / 9, 3), (0.020, 0.0, 2)):
        depth = StepDepth(lag=lag)
        run(depth, 4 * EVERY, step=0.040, latency=latency)
        assert depth.depth == expected


def test_a_fixed_depth_stays() -> None:
    depth = StepDepth(1, 1)
    run(depth, 4 * EVERY, step=0.001, latency=0.05)
    assert depth.depth == 1


def test_idle_time_is_counted_when_the_ranks_ran_dry_with_work_left() -> None:
    depth = StepDepth()
    run(depth, 3, step=0.01, latency=0.002, queued=0)
    assert depth.idle_seconds == pytest.approx(0.006)
    run(depth, 3, step=0.01, latency=0.002, queued=1)
    depth.note_completed(9.0, 0.01, 0)
    depth.note_sent(9.5, False)
    assert depth.idle_seconds == pytest.approx(0.006)
    assert depth.histogram[:2] == [4, 3]
