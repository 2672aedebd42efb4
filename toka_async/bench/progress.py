"""Shows how far a load is: a bar on a terminal, an occasional line elsewhere. Knows counts; knows no server."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

from toka_async.bar import clear_line, draw_line, format_duration, get_columns, write_line

INTERVAL, QUIET_INTERVAL = 0.5, 10.0  # seconds between redraws; between lines without a terminal


class LoadBar:
    """The progress of one load.

    label: the load's name, such as `run 1 of 3`. num_tokens: tokens that the load will generate; None: unknown. clock:
    seconds, monotonic. num_ended: requests that have ended.
    """

    def __init__(
        self,
        stream: TextIO,
        label: str,
        num_requests: int,
        num_tokens: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_ended = 0
        self._stream = stream
        self._label = label
        self._num_requests = num_requests
        self._num_tokens = num_tokens
        self._clock = clock
        self._began = clock()
        self._is_terminal = stream.isatty()
        self.interval = INTERVAL if self._is_terminal else QUIET_INTERVAL

    def count_ended(self) -> None:
        self.num_ended += 1

    def show(self, num_tokens: float | None) -> None:
        """Redraws with the tokens so far; None: the server does not say."""
        line = self._line(num_tokens, self._clock() - self._began)
        if self._is_terminal:
            write_line(self._stream, line)
        else:
            self._stream.write(f"{line}\n")
            self._stream.flush()

    def close(self) -> None:
        """Clears the bar for the lines that follow."""
        if self._is_terminal:
            clear_line(self._stream)

    def _line(self, num_tokens: float | None, seconds: float) -> str:
        if num_tokens is not None and self._num_tokens:
            share = min(1.0, num_tokens / self._num_tokens)
        else:
            share = self.num_ended / max(1, self._num_requests)
        parts = [f"{self.num_ended:,}/{self._num_requests:,} requests"]
        if num_tokens is not None:
            of_all = f"/{self._num_tokens:,}" if self._num_tokens else ""
            parts += [f"{num_tokens:,.0f}{of_all} tokens", f"{num_tokens / max(seconds, 1e-9):,.0f}/s"]
        if 0 < share < 1:
            parts.append(f"{format_duration(seconds / share - seconds)} left")
        return draw_line(share, self._label, ", ".join(parts), get_columns(self._stream))
