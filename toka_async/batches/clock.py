"""The wall clock as expiry needs it: what expires is gone for good, so one that is wrong for a while expires nothing.

Knows no files and no batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 3600.0  # seconds that a jump forward must last until it is believed
TOLERANCE = 2.0  # seconds; adjustments up to this are no jump


class SettledClock:
    """Seconds since 1970, in which a jump forward counts only once it has lasted `PATIENCE`.

    A jump back counts at once: at worst something expires later. So does a machine that slept, an hour after it woke
    up. A clock that is wrong from the start of the process on is believed.

    Args:
        wall: seconds since 1970, which may jump.
        steady: seconds since whenever, which never jump.
    """

    def __init__(self, wall: Callable[[], float] | None = None, steady: Callable[[], float] | None = None) -> None:
        self._wall = wall or time.time
        self._steady = steady or time.monotonic
        self._offset = self._wall() - self._steady()
        self._jumped_at: float | None = None  # by the steady clock

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
