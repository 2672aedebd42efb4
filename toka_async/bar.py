"""Draws a progress bar with text beside it in one line of a terminal, and formats counts and durations."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import TextIO

Show = Callable[[int, int, str], None]  # is told how many of how many are done, and what they are
WIDTH = 30  # of the bar, if there is room
CLEAR = "\r\x1b[K"  # clears the terminal's line


def show_nothing(done: int, total: int, what: str) -> None:
    """A `Show` where nobody looks."""


def get_columns(stream: TextIO) -> int | None:
    """The width of the terminal; None if the stream is not a terminal, where lines can have any length."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def draw_line(share: float, before: str, after: str, columns: int | None) -> str:
    """Draw `before [###   ]  50% after` in less than `columns`: a line that wraps could not be drawn over.

    The bar is shortened first, then the end of the text.
    """
    label = f"{before} " if before else ""
    text = f" {share:4.0%} {after}"
    if columns is None:
        return f"{label}{_bar(share, WIDTH)}{text}"
    width = min(WIDTH, columns - 1 - len(label) - len("[]") - len(text))
    return f"{label}{_bar(share, width) if width > 0 else ''}{text}"[: max(1, columns - 1)]


def _bar(share: float, width: int) -> str:
    return f"[{'#' * round(width * share):<{width}}]"


def write_line(stream: TextIO, line: str) -> None:
    """Write over the terminal's line."""
    stream.write(f"\r{line}\x1b[K")
    stream.flush()


def clear_line(stream: TextIO) -> None:
    """Clear the terminal's line for what follows."""
    stream.write(CLEAR)
    stream.flush()


def format_count(number: int, what: str) -> str:
    """Format as `1 line` or `2,000 lines`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def format_duration(seconds: float) -> str:
    """Format as `1:02:03` or `2:03`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
