from __future__ import annotations

import pytest

from tests.fakes.clock import Clock
from tests.unit.procs.test_rank import Link
from toka_async.procs.child import Alive, Fatal
from toka_async.procs.progress import WorkProgress, answer_while_moving


def test_work_that_moves_is_not_stuck() -> None:
    clock = Clock()
    progress = WorkProgress(clock)
    clock.now += 100
    assert progress.measure_stall() == 0  # idle
    progress.begin()
    clock.now += 3
    assert progress.measure_stall() == 3
    progress.begin()
    assert progress.measure_stall() == 0
    clock.now += 4
    progress.end()
    clock.now += 1
    assert progress.measure_stall() == 1  # the second has not ended
    progress.end()
    clock.now += 100
    assert progress.measure_stall() == 0


@pytest.mark.parametrize("timeout", [10.0, 0.0])
def test_stuck_work_ends_the_process(timeout: float) -> None:
    clock, link = Clock(), Link()
    progress = WorkProgress(clock)
    answer_while_moving(link, progress, timeout, "a step")
    progress.begin()
    clock.now += 9
    link.on_beat()
    assert link.statuses == [Alive()]
    clock.now += 2
    if timeout:
        with pytest.raises(SystemExit):
            link.on_beat()
        assert link.statuses[1:] == [Fatal("a step did not end in 10 s")]
    else:
        link.on_beat()
        assert link.statuses == [Alive(), Alive()]
