"""Running work makes way for waiting work of a strictly higher priority (a lower number), the last in order first.

A slot is taken for each sequence that waits and can start in a step. How many pages it needs is the admission policy's
secret: while the first that waits is refused for its pages, every step takes back twice as much as the one before. What
made way is computed again (`preemption`). Knows the running set and the queue.
"""

from __future__ import annotations

from toka_async.scheduler.admission.preemption import Preemption
from toka_async.scheduler.sequences.queues import JobQueue
from toka_async.scheduler.sequences.requests import PrefillTask, Request
from toka_async.scheduler.sequences.running import RunningSet


class Yielding:
    """Before a step is built: who makes way.

    Args:
        max_tokens: of a step.
    """

    def __init__(self, running: RunningSet, queue: JobQueue, preemption: Preemption, max_tokens: int) -> None:
        self._running = running
        self._queue = queue
        self._preemption = preemption
        self._max_tokens = max_tokens
        self._lacks_pages: Request | None = None
        self._num_yielding = 0  # lanes that made way for pages the last time

    def refused(self, job: PrefillTask) -> None:
        """The first that waits does not start in the step that is built: with a slot for it, it lacks pages."""
        self._lacks_pages = job.request if self._running.num_free_slots > 0 else None

    def make_way(self) -> None:
        """Takes back what is needed, from lanes of lower priorities."""
        refused, self._lacks_pages = self._lacks_pages, None
        first = self._first()
        lowest = None if first is None else self._running.lanes.lowest_priority()
        if first is None or lowest is None or lowest <= first.submit.priority:
            self._num_yielding = 0
            return
        self._num_yielding = max(1, 2 * self._num_yielding) if first is refused else 0
        tables, num_taken = self._running.lanes, 0
        for lane in tables.last_in_order().tolist():
            priority = int(tables.priority[lane])
            is_needed = num_taken < self._num_yielding or self._running.num_free_slots < self._num_wanted(priority)
            if priority <= first.submit.priority or not is_needed:
                return
            if tables.holds[lane]:
                self._preemption.make_way(lane)
                num_taken += 1

    def _first(self) -> Request | None:
        """Of those that wait."""
        job, forking = self._queue.first(), self._running.forking
        if job is None or (forking and forking[0].job.order < job.order):
            return forking[0].request if forking else None
        return job.request

    def _num_wanted(self, priority: int) -> int:
        """Slots for the sequences that come before a priority, as many as can start in a step."""
        num_jobs, num_tokens = self._queue.before(priority)
        if num_tokens > self._max_tokens:
            num_jobs = max(1, num_jobs * self._max_tokens // num_tokens)
        forking = self._running.forking
        return num_jobs + sum(run.num_pending for run in forking if run.request.submit.priority < priority)
