"""Shows people what a rank does before it is ready: a line per stage, with a bar on a terminal."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from toka_async.bar import clear_line, draw_line, get_columns, write_line

_INTERVAL = 0.1  # seconds between redraws


class StartupProgress:
    """Shows the current stage and its time; `seconds` keeps every stage's time."""

    def __init__(self, stream: TextIO, shown: bool = True, logged: bool = True) -> None:
        """shown: on the stream, if it is a terminal. logged: `report` writes to the log."""
        self.seconds: dict[str, float] = {}
        self._stream = stream
        self._on_terminal = shown and stream.isatty()
        self._logger = logging.getLogger(__name__) if logged else None
        self._stage = ""
        self._began = 0.0
        self._drawn = 0.0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Shows and times a stage, which is what happens within."""
        self._stage, self._began, self._drawn = name, time.monotonic(), 0.0
        self.show(0, 1)
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - self._began
            if self._on_terminal:
                clear_line(self._stream)

    def show(self, done: int, total: int) -> None:
        """Redraws the bar, a few times a second: `done` of `total` parts of the stage are done."""
        now = time.monotonic()
        if not self._on_terminal or now < self._drawn + _INTERVAL:
            return
        self._drawn = now
        text = f"{now - self._began:.1f} s"
        write_line(self._stream, draw_line(done / max(1, total), self._stage, text, get_columns(self._stream)))

    def report(self) -> None:
        """Logs all stages' times in one line."""
        if self._logger is not None:
            parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items())
            self._logger.info("warm after %.1f s: %s", sum(self.seconds.values()), parts)
