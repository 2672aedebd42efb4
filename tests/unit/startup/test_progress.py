import io
import logging
import re
import time

import pytest

from tests.fakes.terminal import Terminal
from toka_async.startup import progress as stages_module
from toka_async.startup.progress import StartupProgress


class Clock:
    """Stands still but when told."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        patch.setattr(time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_times_of_stages(clock: Clock) -> None:
    stages = StartupProgress(io.StringIO())
    for name, seconds in (("weights", 2.0), ("warm-up", 1.5), ("weights", 3.0)):
        with stages.stage(name):
            clock.now += seconds
    assert stages.seconds == {"weights": 5.0, "warm-up": 1.5}


def test_a_report_is_one_line(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    stages = StartupProgress(io.StringIO())
    for name, seconds in (("weights", 2.0), ("graphs", 1.25)):
        with stages.stage(name):
            clock.now += seconds
    with caplog.at_level(logging.INFO, stages_module.__name__):
        stages.report()
    assert caplog.messages == ["warm after 3.2 s: weights 2.0 s, graphs 1.2 s"]


def test_a_bar_on_a_terminal(clock: Clock) -> None:
    terminal = Terminal()
    stages = StartupProgress(terminal)
    with stages.stage("graphs"):
        clock.now += 1
        stages.show(1, 2)
        assert terminal.getvalue().endswith(f"\rgraphs [{'#' * 15}{' ' * 15}]  50% 1.0 s\x1b[K")
    assert terminal.getvalue().startswith(f"\rgraphs [{' ' * 30}]   0% 0.0 s")
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_it_is_redrawn_ten_times_a_second(clock: Clock) -> None:
    terminal = Terminal()
    stages = StartupProgress(terminal)
    with stages.stage("graphs"):
        for done in range(100):
            stages.show(done, 100)
            clock.now += 0.01
    assert 10 <= len(re.findall("graphs", terminal.getvalue())) <= 12


@pytest.mark.parametrize(("stream", "shown"), [(io.StringIO(), True), (Terminal(), False)])
def test_nothing_is_drawn_elsewhere(
    stream: io.StringIO, shown: bool, caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    stages = StartupProgress(stream, shown, logged=shown)
    with stages.stage("weights"):
        clock.now += 1
        stages.show(1, 0)
    with caplog.at_level(logging.INFO):
        stages.report()
    assert stream.getvalue() == ""
    assert len(caplog.messages) == shown


def test_an_error_finds_an_empty_line() -> None:
    terminal = Terminal()
    with pytest.raises(ValueError, match="broken"), StartupProgress(terminal).stage("weights"):
        raise ValueError("broken")
    assert terminal.getvalue().endswith("\r\x1b[K")
