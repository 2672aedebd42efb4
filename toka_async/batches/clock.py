"""The wall clock for expiry. What expires is gone for good, so a clock that is briefly wrong expires nothing.

Knows no files and no batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 3600.0  # seconds until a jump forward is believed
TOLERANCE = 2.0  # seconds; smaller adjustments are no jump


class SettledClock:
    """Seconds since 1970; a jump forward counts only once it has lasted `PATIENCE`.

    A jump back counts at once: at worst something expires later. The time of a machine that slept counts an hour after
    it woke. A clock that is wrong from the start of the process is believed. wall: seconds since 1970, which may jump.
    steady: seconds since any time, which never jump.
    """

    def __init__(self, wall: Callable[[], float] | None = None, steady: Callable[[], float] | None = None) -> None:
        self._wall = wall or time.time
        self._steady = steady or time.monotonic
        self._offset = self._wall() - self._steady()
        self._jumped_at: float | None = None  # steady time

    def __call__(self) -> float:
        steady = self._steady()
        offset = self._wall() - steady
        if offset <= self._offset + TOLERANCE:
            self._offset, self._jumped_at = offset, None
        elif self._jumped_at is None:
            self._jumped_at = steady
        elif steady - self._jumped_at >= PATIENCE:
            self._offset, self._jumped_at = offset, None
        return steady + self._offset
