from __future__ import annotations

import io
from typing import Any

import pytest

from tests.fakes.clock import Clock
from toka_async.llm.progress_bar import LineBar, make_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_is_drawn_now_and_then_and_at_the_end() -> None:
    stream, clock = Terminal(), Clock()
    bar = LineBar(stream, 4, clock)
    bar.update()
    drawn = stream.getvalue()
    assert " 1/4" in drawn
    bar.update()
    assert stream.getvalue() == drawn
    bar.update(2)
    bar.close()
    assert " 4/4" in stream.getvalue()
    assert stream.getvalue().endswith("\n")


def test_there_is_no_bar_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", io.StringIO())
    assert make_bar(True, 3) is None
    monkeypatch.setattr("sys.stderr", Terminal())
    assert make_bar(False, 3) is None
    assert isinstance(make_bar(True, 3), LineBar)


def test_a_class_like_tqdm_makes_its_own_bar() -> None:
    made: list[dict[str, Any]] = []

    class Bar:
        def __init__(self, **options: Any) -> None:
            made.append(options)

        def update(self, n: int = 1) -> None: ...

        def close(self) -> None: ...

    assert isinstance(make_bar(Bar, 3), Bar)
    assert made[0]["total"] == 3
