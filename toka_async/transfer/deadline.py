"""Waiting with an end."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

from toka_async.transfer.errors import TransferTimeoutError

EVERY = 0.0005


class Deadline:
    """seconds: from now on, by `clock`."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._end = clock() + seconds

    @property
    def left(self) -> timedelta:
        """At least a millisecond: 0 means for ever to some."""
        return timedelta(seconds=max(0.001, self._end - self._clock()))

    def make_error(self, what: str) -> TransferTimeoutError:
        return TransferTimeoutError(f"{what} did not end within {self._seconds:g} s")

    def wait_until(self, is_done: Callable[[], bool], what: str, every: float = EVERY) -> None:
        """Raises TransferTimeoutError. every: seconds between two looks."""
        while not is_done():
            if self._clock() > self._end:
                raise self.make_error(what)
            time.sleep(every)
