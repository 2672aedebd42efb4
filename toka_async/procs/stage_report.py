"""Reports now and then how long a pipeline stage computed and waited. Knows steps' times, not their contents."""

from __future__ import annotations

import time
from collections.abc import Callable

from toka_async.messages import FromRank, StageTimes, StepDone
from toka_async.transport.base import Outbox

INTERVAL = 0.25  # seconds between two messages while steps come


class StageReport:
    """Sums over a stage's steps, sent to `results`."""

    def __init__(self, stage: int, results: Outbox[FromRank], clock: Callable[[], float] = time.monotonic) -> None:
        self._stage = stage
        self._results = results
        self._clock = clock
        self._sent_at = float("-inf")
        self._seconds = self._stalled = self._waited = 0.0

    def add(self, step: StepDone) -> None:
        self._seconds += step.seconds
        self._stalled += step.stalled
        self._waited += step.waited
        now = self._clock()
        if now - self._sent_at >= INTERVAL:
            self._sent_at = now
            self._results.send(StageTimes(self._stage, self._seconds, self._stalled, self._waited))
