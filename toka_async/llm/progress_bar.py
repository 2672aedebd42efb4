"""The progress of a call with many prompts: a line of a terminal or a notebook, or the user's own bar."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Protocol, TextIO

from toka_async.bar import draw_line, get_columns, write_line

INTERVAL = 0.1  # seconds between two drawings
DESCRIPTION = "Processed prompts"


class ProgressBar(Protocol):
    """What tqdm's bars have."""

    def update(self, n: int = 1) -> object: ...

    def close(self) -> object: ...


def make_bar(use_tqdm: bool | Callable[..., Any], total: int) -> ProgressBar | None:
    """Make the bar of a call: none, ours, or what a class like tqdm makes. Ours is shown where it can be drawn."""
    if callable(use_tqdm):
        bar: ProgressBar = use_tqdm(total=total, desc=DESCRIPTION, dynamic_ncols=True)
        return bar
    if use_tqdm and sys.stderr is not None and (sys.stderr.isatty() or "ipykernel" in sys.modules):
        return LineBar(sys.stderr, total)
    return None


class LineBar:
    """Draws over one line of a stream."""

    def __init__(self, stream: TextIO, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._total = total
        self._clock = clock
        self._num_done = 0
        self._began = clock()
        self._next_draw = 0.0

    def update(self, n: int = 1) -> None:
        self._num_done += n
        if self._clock() >= self._next_draw:
            self._draw()

    def close(self) -> None:
        """Draw the last state, and leave the line."""
        self._draw()
        self._stream.write("\n")
        self._stream.flush()

    def _draw(self) -> None:
        now = self._clock()
        self._next_draw = now + INTERVAL
        rate = self._num_done / max(now - self._began, 1e-6)
        what = f"{self._num_done:,}/{self._total:,}, {rate:,.1f} prompts/s"
        share = self._num_done / max(self._total, 1)
        write_line(self._stream, draw_line(share, DESCRIPTION, what, get_columns(self._stream)))
