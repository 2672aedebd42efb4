from __future__ import annotations

import io

from toka_async.model.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_one_line() -> None:
    stream = Terminal()
    bar = Progress("loading weights", 4 << 30, stream)
    bar.add(1 << 30)
    bar.add(3 << 30)  # too soon to draw again
    bar.finish()
    first, last = stream.getvalue().removeprefix("\r").split("\r")
    assert first == f"loading weights [{'#' * 8:<30}]  25% 1.00/4.00 GiB"
    assert last == f"loading weights [{'#' * 30}] 100% 4.00/4.00 GiB\n"


def test_other_streams_get_nothing() -> None:
    stream = io.StringIO()
    bar = Progress("loading weights", 10, stream)
    bar.add(10)
    bar.finish()
    assert stream.getvalue() == ""
