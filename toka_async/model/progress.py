"""A one-line progress bar for loading weights. Knows bytes and a text stream."""

from __future__ import annotations

import time
from typing import TextIO

WIDTH = 30
UNITS = (("GiB", 2**30), ("MiB", 2**20), ("bytes", 1))
INTERVAL = 0.1  # seconds between redraws


class LoadProgress:
    """Redraws its line a few times a second; draws nothing on a stream that is no terminal."""

    def __init__(self, label: str, total: int, stream: TextIO) -> None:
        self.label = label
        self.total = total
        self.stream = stream
        self.shown = stream.isatty()
        self.done = 0
        self.next_draw = 0.0

    def add(self, count: int) -> None:
        self.done += count
        if self.shown and time.monotonic() >= self.next_draw:
            self.next_draw = time.monotonic() + INTERVAL
            self._draw("")

    def finish(self) -> None:
        """Ends the line, wherever it stands."""
        if self.shown:
            self._draw("\n")

    def _draw(self, end: str) -> None:
        share = self.done / self.total if self.total else 1.0
        bar = "#" * round(WIDTH * share)
        unit, size = next(each for each in UNITS if self.total >= each[1] or each[1] == 1)
        amount = f"{self.done / size:.2f}/{self.total / size:.2f} {unit}"
        self.stream.write(f"\r{self.label} [{bar:<{WIDTH}}] {share:4.0%} {amount}{end}")
        self.stream.flush()
