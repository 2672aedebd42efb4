"""Shows people what a rank does before it is ready: a bar on a terminal, lines in a log.

A stage of less than two seconds leaves nothing in a log. A longer one is told every few seconds, also while the code in
it computes without a word: a thread looks at the clock.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from toka_async.bar import clear_line, draw_line, get_columns, write_line

LONG = 2.0  # seconds after which a stage is worth a line
_REDRAW_SECONDS, _LINE_SECONDS = 0.1, 5.0  # between two drawings of the bar, and two lines
_LEAST_REPORTED = 0.05  # seconds of a stage that the report names
_TICK = 0.25  # seconds between two looks at the clock

logger = logging.getLogger(__name__)


class StartupProgress:
    """Shows the current stage, how far it is, and its time; `seconds` keeps every stage's time."""

    def __init__(
        self, stream: TextIO | None = None, shown: bool = True, logged: bool = True, tick: float = _TICK
    ) -> None:
        """shown: on the stream, if it is a terminal. logged: in the log, if it is none; the last line in any case.

        stream: None: standard error, which a process may lack.
        """
        self.seconds: dict[str, float] = {}
        self._stream = stream = stream or sys.stderr
        is_terminal = stream is not None and stream.isatty()
        self._on_terminal = shown and is_terminal
        self._in_log = logged and not is_terminal
        self._reports = logged
        self._tick = tick
        self._lock = threading.Lock()  # of what follows, for the thread
        self._stage = self._what = ""
        self._done = self._total = 0
        self._began = self._due = 0.0

    @contextmanager
    def stage(self, name: str, what: str = "") -> Iterator[None]:
        """Shows and times a stage, which is what happens within. what: it does, until `show` says more."""
        ended = threading.Event()
        with self._lock:
            self._stage, self._what, self._done, self._total = name, what, 0, 0
            self._began = time.monotonic()
            self._due = self._began + (0.0 if self._on_terminal else LONG)
            self._tell()
        if self._on_terminal or self._in_log:
            threading.Thread(target=self._follow, args=(ended,), name="progress", daemon=True).start()
        try:
            yield
        finally:
            with self._lock:
                ended.set()
                seconds = time.monotonic() - self._began
                self.seconds[name] = self.seconds.get(name, 0.0) + seconds
                if self._on_terminal:
                    clear_line(self._stream)
                elif self._in_log and seconds >= LONG:
                    logger.info("%s: ended after %.1f s", name, seconds)

    def show(self, done: int, total: int, what: str) -> None:
        """Tells how far the stage is: `done` of `total` of `what` are done."""
        with self._lock:
            self._done, self._total, self._what = done, total, what
            self._tell()

    def report(self) -> None:
        """Logs all stages' times in one line, if the start was long."""
        seconds = sum(self.seconds.values())
        if self._reports and seconds >= LONG:
            parts = [f"{name} {each:.1f} s" for name, each in self.seconds.items() if each >= _LEAST_REPORTED]
            logger.info("warm after %.1f s: %s", seconds, ", ".join(parts))

    def _follow(self, ended: threading.Event) -> None:
        """Tells the time while the stage lasts."""
        while not ended.wait(self._tick):
            with self._lock:
                if not ended.is_set():
                    self._tell()

    def _tell(self) -> None:
        now = time.monotonic()
        if now < self._due:
            return
        text = f"{self._done:,} of {self._total:,} {self._what}" if self._total else self._what
        seconds = f"{now - self._began:.1f} s"
        if self._on_terminal:
            self._due = now + _REDRAW_SECONDS
            after = f"{text}, {seconds}" if text else seconds
            share = self._done / max(1, self._total)
            write_line(self._stream, draw_line(share, self._stage, after, get_columns(self._stream)))
        elif self._in_log:
            self._due = now + _LINE_SECONDS
            logger.info("%s (%s)", f"{self._stage}: {text}" if text else self._stage, seconds)
