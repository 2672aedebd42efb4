import time

import pytest
import torch

from toka_async.runner.clock import StepClock, StepSpan


class Host:
    """The host's clock."""

    def __init__(self) -> None:
        self.now = 50.0


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    host = Host()
    monkeypatch.setattr(time, "perf_counter", lambda: host.now)
    return host


@pytest.fixture
def clock() -> StepClock:
    return StepClock(torch.device("cpu"))


def step(clock: StepClock, host: Host, waits: float, takes: float) -> StepSpan:
    host.now += waits
    span = clock.begin()
    host.now += takes
    return clock.end(span)


def test_steps_and_the_time_between_them(clock: StepClock, host: Host) -> None:
    spans = [step(clock, host, 3.0, 0.5), step(clock, host, 0.25, 2.0), step(clock, host, 0.0, 1.0)]
    assert [clock.measure(span) for span in spans] == [(0.5, 0.0), (2.0, 0.25), (1.0, 0.0)]


def test_a_step_that_began_before_the_last_ended_did_not_wait(clock: StepClock, host: Host) -> None:
    """Launched ahead: both lie in one another."""
    first, second = clock.begin(), clock.begin()
    host.now += 1.0
    clock.end(first)
    host.now += 1.0
    clock.end(second)
    assert [clock.measure(first), clock.measure(second)] == [(1.0, 0.0), (2.0, 0.0)]


def test_a_step_must_have_ended(clock: StepClock) -> None:
    with pytest.raises(AssertionError):
        clock.measure(clock.begin())


def test_waits_for_other_ranks_are_part_of_a_step(clock: StepClock, host: Host) -> None:
    span = clock.begin()
    for waits, takes in ((0.25, 1.0), (0.5, 2.0)):
        with clock.stall(span):
            host.now += waits
        host.now += takes
    clock.end(span)
    assert clock.measure(span) == (3.75, 0.0)
    assert clock.measure_stalls(span) == 0.75
    assert clock.measure_stalls(step(clock, host, 1.0, 1.0)) == 0.0
