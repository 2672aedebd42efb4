from __future__ import annotations

import pytest

from toka_async.bar import draw_line, format_count, format_duration

TEXT = "3/4 lines, 12 tokens"


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (None, f"run [{'#' * 15}{' ' * 15}]  50% {TEXT}"),
        (200, f"run [{'#' * 15}{' ' * 15}]  50% {TEXT}"),
        (43, f"run [#####     ]  50% {TEXT}"),
        (33, f"run   50% {TEXT}"),
        (20, "run   50% 3/4 lines"),
        (0, "r"),
    ],
)
def test_a_line_stays_within_the_terminal(columns: int | None, line: str) -> None:
    """The bar gives way first, then the end of the text."""
    assert draw_line(0.5, "run", TEXT, columns) == line


def test_times() -> None:
    assert [format_duration(seconds) for seconds in (0, 59.6, 3723)] == ["0:00", "1:00", "1:02:03"]


def test_one_is_singular() -> None:
    assert [format_count(number, "line") for number in (0, 1, 2000)] == ["0 lines", "1 line", "2,000 lines"]
