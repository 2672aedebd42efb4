from __future__ import annotations

import io

import pytest

from toka_async.model.progress import LoadProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_one_line() -> None:
    stream = Terminal()
    bar = LoadProgress("loading weights", 4 << 30, stream)
    bar.add(1 << 30)
    bar.add(3 << 30)  # too soon to draw again
    bar.finish()
    first, last = stream.getvalue().removeprefix("\r").split("\r")
    assert first == f"loading weights [{'#' * 8:<30}]  25% 1.00/4.00 GiB"
    assert last == f"loading weights [{'#' * 30}] 100% 4.00/4.00 GiB\n"


def test_other_streams_get_nothing() -> None:
    stream = io.StringIO()
    bar = LoadProgress("loading weights", 10, stream)
    bar.add(10)
    bar.finish()
    assert stream.getvalue() == ""


@pytest.mark.parametrize(("total", "amount"), [(5 << 20, "5.00/5.00 MiB"), (999, "999.00/999.00 bytes"), (0, "0.00")])
def test_a_small_model_is_not_none(total: int, amount: str) -> None:
    stream = Terminal()
    bar = LoadProgress("loading weights", total, stream)
    bar.add(total)
    bar.finish()
    assert amount in stream.getvalue().split("\r")[-1]
