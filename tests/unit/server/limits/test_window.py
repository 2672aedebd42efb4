from __future__ import annotations

import pytest

from toka_async.server.limits.account import Cost
from toka_async.server.limits.window import MIN_WAITING, EngineLoad, Window, choose_size


@pytest.mark.parametrize(
    ("load", "in_flight", "size"),
    [
        (EngineLoad(256), 0, 320),  # nothing is there yet: all rows, and some behind
        (EngineLoad(256, running=100, waiting=10), 0, 210),  # but for what others have
        (EngineLoad(256, running=256, waiting=64), 320, 320),  # as it should be
        (EngineLoad(256, running=256, waiting=0), 320, 384),  # the queue has run dry
        (EngineLoad(256, running=256, waiting=264), 320, 120),  # others fill it
        (EngineLoad(256, running=10, waiting=2000), 100, 1),
        (EngineLoad(8192, running=8192, waiting=0), 8192, 10240),  # a quarter of what runs
        (EngineLoad(8192, running=100, waiting=0), 100, 264),  # free rows, by doubling
        (EngineLoad(8192, running=100, waiting=100), 200, 164),  # rows are free, but the cache is full
        (EngineLoad(256, running=256, waiting=0), 5000, 576),  # twice the rows
        (EngineLoad(8192, running=8000, waiting=0), 10000, 11000),  # the limit
        (EngineLoad(0), 10, 0),  # nobody is there
    ],
)
def test_the_size_follows_the_queues(load: EngineLoad, in_flight: int, size: int) -> None:
    assert choose_size(load, in_flight, 11_000) == size


def test_the_last_line_may_exceed_the_size() -> None:
    reports: list[int] = []
    window = Window(100, lambda: reports.append(window.size))
    line = Cost(1, 0, 30)
    assert not window.fits(line), "nobody has said what the engine can take"
    window.report(EngineLoad(4))
    assert reports == [4 + MIN_WAITING]
    for _ in range(3):
        assert window.fits(line)
        window.add(line)
    assert not window.fits(Cost(1, 0, 1))
    window.remove(line)
    assert window.fits(line)


def test_a_closed_window_opens_with_the_next_report_of_an_engine_that_takes_requests() -> None:
    window = Window(100, lambda: None)
    for load, is_open in ((EngineLoad(4), True), (EngineLoad(0), False), (EngineLoad(4), True)):
        window.close()
        assert not window.fits(Cost(1, 0, 1))
        window.report(load)
        assert window.fits(Cost(1, 0, 1)) == is_open
