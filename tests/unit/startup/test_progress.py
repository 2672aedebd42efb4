import io
import logging
import re
import threading
from types import SimpleNamespace

import pytest

from tests.drivers.until import wait_until
from tests.fakes.terminal import Terminal
from toka_async.startup import progress as stages_module
from toka_async.startup.progress import StartupProgress


class Clock:
    """Stands still but when told."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        patch.setattr(stages_module, "time", SimpleNamespace(monotonic=lambda: self.now))


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
    for name, seconds in (("weights", 2.0), ("memory", 0.01), ("graphs", 1.25)):
        with stages.stage(name):
            clock.now += seconds
    with caplog.at_level(logging.INFO, stages_module.__name__):
        stages.report()
    assert caplog.messages[-1:] == ["warm after 3.3 s: weights 2.0 s, graphs 1.2 s"]


def test_a_quick_start_is_not_reported(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    stages = StartupProgress(io.StringIO())
    with caplog.at_level(logging.INFO, stages_module.__name__):
        with stages.stage("weights"):
            clock.now += 1.9
        stages.report()
    assert not caplog.messages


def test_a_bar_on_a_terminal(clock: Clock) -> None:
    terminal = Terminal()
    stages = StartupProgress(terminal, tick=1000)
    with stages.stage("graphs", "capturing"):
        clock.now += 1
        stages.show(1, 2, "graphs captured")
        assert terminal.getvalue().endswith(f"\rgraphs [{'#' * 15}{' ' * 15}]  50% 1 of 2 graphs captured, 1.0 s\x1b[K")
    assert terminal.getvalue().startswith(f"\rgraphs [{' ' * 30}]   0% capturing, 0.0 s")
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_it_is_redrawn_ten_times_a_second(clock: Clock) -> None:
    terminal = Terminal()
    stages = StartupProgress(terminal, tick=1000)
    with stages.stage("weights"):
        for done in range(100):
            stages.show(done, 100, "MiB loaded")
            clock.now += 0.01
    assert 10 <= len(re.findall("weights", terminal.getvalue())) <= 12


def test_lines_in_a_log(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """The first after two seconds, then one every five seconds, and one about the end."""
    stages = StartupProgress(io.StringIO(), tick=1000)
    with caplog.at_level(logging.INFO, stages_module.__name__), stages.stage("attention", "compiling kernels"):
        for done in range(16):
            stages.show(done, 1500, "shapes measured")
            clock.now += 0.5
    assert caplog.messages == [
        "attention: 4 of 1,500 shapes measured (2.0 s)",
        "attention: 14 of 1,500 shapes measured (7.0 s)",
        "attention: ended after 8.0 s",
    ]


def test_a_short_stage_leaves_no_line(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    stages = StartupProgress(io.StringIO(), tick=1000)
    with caplog.at_level(logging.INFO, stages_module.__name__), stages.stage("weights"):
        clock.now += 1.9
        stages.show(1, 2, "MiB loaded")
    assert not caplog.messages


def test_what_computes_without_a_word_is_told_too(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """By a thread that looks at the clock, until the stage ends."""
    terminal = Terminal()
    with StartupProgress(terminal, tick=0.001).stage("memory", "computing"):
        clock.now += 3
        wait_until(lambda: "computing, 3.0 s" in terminal.getvalue())
    stages = StartupProgress(io.StringIO(), tick=0.001)
    with caplog.at_level(logging.INFO, stages_module.__name__):
        for name, what in (("memory", "computing"), ("libraries", "")):
            with stages.stage(name, what):
                clock.now += 3
                wait_until(lambda: len(caplog.messages) % 2 == 1)
    assert caplog.messages == [
        *("memory: computing (3.0 s)", "memory: ended after 3.0 s"),
        *("libraries (3.0 s)", "libraries: ended after 3.0 s"),
    ]
    wait_until(lambda: not [each for each in threading.enumerate() if each.name == "progress"])


@pytest.mark.parametrize(
    ("stream", "shown", "logged"), [(io.StringIO(), True, False), (Terminal(), False, True), (Terminal(), False, False)]
)
def test_nobody_looks(
    stream: io.StringIO, shown: bool, logged: bool, caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    """A second bar, and lines of others, would disturb the bar that is drawn. The report is the last line."""
    stages = StartupProgress(stream, shown, logged)
    with caplog.at_level(logging.INFO):
        with stages.stage("weights"):
            clock.now += 10
            stages.show(1, 0, "MiB loaded")
        stages.report()
    assert stream.getvalue() == ""
    assert caplog.messages == ["warm after 10.0 s: weights 10.0 s"] * logged


def test_an_error_finds_an_empty_line() -> None:
    terminal = Terminal()
    with pytest.raises(ValueError, match="broken"), StartupProgress(terminal).stage("weights"):
        raise ValueError("broken")
    assert terminal.getvalue().endswith("\r\x1b[K")
