"""What a rank does before it is ready, told to people: a line per stage, with a bar on a terminal.

Knows names and times of stages.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

_BAR = 30  # characters
_INTERVAL = 0.1  # seconds between redraws


class StartupProgress:
    """Shows the stage at work and how long it has taken; `seconds` keeps every stage's time."""

    def __init__(self, stream: TextIO, shown: bool = True) -> None:
        self.seconds: dict[str, float] = {}
        self._stream = stream
        self._on_terminal = shown and stream.isatty()
        self._logger = logging.getLogger(__name__) if shown else None
        self._stage = ""
        self._began = 0.0
        self._drawn = 0.0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """What happens inside is this stage."""
        self._stage, self._began, self._drawn = name, time.monotonic(), 0.0
        self.show(0, 1)
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - self._began
            if self._on_terminal:
                self._stream.write("\r\x1b[K")
                self._stream.flush()

    def show(self, done: int, total: int) -> None:
        """So much of the stage is done."""
        now = time.monotonic()
        if not self._on_terminal or now < self._drawn + _INTERVAL:
            return
        self._drawn = now
        bar = "#" * (_BAR * done // max(1, total))
        self._stream.write(f"\r{self._stage} [{bar:<{_BAR}}] {done}/{total} {now - self._began:.1f} s\x1b[K")
        self._stream.flush()

    def report(self) -> None:
        """One line with all stages' times."""
        if self._logger is not None:
            parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items())
            self._logger.info("warm after %.1f s: %s", sum(self.seconds.values()), parts)
