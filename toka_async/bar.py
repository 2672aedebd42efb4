"""A bar with what is said beside it, in one line of a terminal."""

from __future__ import annotations

import shutil
from typing import TextIO

WIDTH = 30  # of the bar, where there is room for it


def columns_of(stream: TextIO) -> int | None:
    """How wide the terminal is; None where the stream is none, and lines can have any length."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def line_with_bar(share: float, before: str, after: str, columns: int | None) -> str:
    """`before [###   ]  50% after`, in less than `columns`: a line that wraps could not be drawn over.

    What does not fit shortens the bar, and then the end of the text.
    """
    label = f"{before} " if before else ""
    text = f" {share:4.0%} {after}"
    if columns is None:
        return f"{label}{_bar(share, WIDTH)}{text}"
    width = min(WIDTH, columns - 1 - len(label) - len("[]") - len(text))
    return f"{label}{_bar(share, width) if width > 0 else ''}{text}"[: max(1, columns - 1)]


def _bar(share: float, width: int) -> str:
    return f"[{'#' * round(width * share):<{width}}]"


def duration(seconds: float) -> str:
    """`1:02:03` or `2:03`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
