from __future__ import annotations

import time

import pytest
import torch

from tests.fakes.graphs import FakeEvent
from toka_async.tuning.clock import HEAD_START, time_alone, time_calls, time_host, time_launches


class Device:
    """now: milliseconds. log: what it was told beside its calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.log: list[object] = []
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: FakeEvent(lambda: self.now))  # noqa: ARG005
        monkeypatch.setattr(torch.cuda, "_sleep", self.log.append)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: self.log.append("wait"))

    def call(self) -> None:
        self.now += 2.0


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def test_calls_are_timed_together(device: Device) -> None:
    assert time_calls(device.call, 3) == pytest.approx(6.0)
    assert device.log == []


@pytest.mark.parametrize("num_calls", [4, 12])
@pytest.mark.parametrize(("seconds", "launches"), [(0.00012, 3), (1.5, 40)])
def test_the_host_gets_the_time_that_it_needs(
    seconds: float, launches: int, num_calls: int, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first call that has compiled kernels does not count."""
    readings = iter([10.0, 10.0 + seconds])
    monkeypatch.setattr(time, "perf_counter", lambda: next(readings))
    assert time_launches(device.call, num_calls) == pytest.approx(2.0 * num_calls)
    assert device.log == ["wait", min(num_calls, 8) * launches * HEAD_START]


def test_the_host_may_get_a_head_start(device: Device) -> None:
    assert time_calls(device.call, head_start=5) == pytest.approx(2.0)
    assert device.log == [5 * HEAD_START]


def test_alone_the_device_is_idle_before(device: Device) -> None:
    assert time_alone(device.call) == pytest.approx(2.0)
    assert device.log == ["wait"]


def test_the_host_is_timed_while_the_device_is_idle(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", iter((5.0, 8.0)).__next__)
    assert time_host(device.call) == 3.0
    assert device.log == ["wait"]
