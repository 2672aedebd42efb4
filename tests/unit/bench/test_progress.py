from __future__ import annotations

import io

import pytest

from tests.fakes.clock import Clock
from tests.fakes.terminal import Terminal
from toka_async.bench.progress import LoadBar


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    stream, clock = Terminal(), Clock()
    bar = LoadBar(stream, "run 1 of 3", 16, 100_000, clock)
    bar.count_ended()
    clock.now += 10.0
    bar.show(25_000)
    bar.close()
    assert stream.getvalue() == (
        "\rrun 1 of 3 [########                      ]  25% 1/16 requests, 25,000/100,000 tokens, 2,500/s, 0:30 left"
        "\x1b[K\r\x1b[K"
    )


def test_a_narrow_terminal_sees_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    stream, clock = Terminal(), Clock()
    bar = LoadBar(stream, "measuring how much fits", 16, 100_000, clock)
    clock.now += 10.0
    bar.show(25_000)
    (line,) = stream.getvalue().removeprefix("\r").removesuffix("\x1b[K").split("\r")
    assert len(line) < 80
    assert "25,000/100,000 tokens" in line


@pytest.mark.parametrize(
    ("num_tokens", "counted", "line"),
    [
        (None, 500.0, "running [###############               ]  50% 2/4 requests, 500 tokens, 50/s, 0:10 left\n"),
        (None, None, "running [###############               ]  50% 2/4 requests, 0:10 left\n"),
        (100, None, "running [###############               ]  50% 2/4 requests, 0:10 left\n"),
        (100, 101.0, "running [##############################] 100% 2/4 requests, 101/100 tokens, 10/s\n"),
    ],
)
def test_lines_elsewhere(num_tokens: int | None, counted: float | None, line: str) -> None:
    """What the server does not count, or nobody knows before, is left out."""
    stream, clock = io.StringIO(), Clock()
    bar = LoadBar(stream, "running", 4, num_tokens, clock)
    bar.count_ended()
    bar.count_ended()
    clock.now += 10.0
    bar.show(counted)
    bar.close()
    assert stream.getvalue() == line
