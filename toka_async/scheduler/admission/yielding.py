"""Running work makes way for waiting work of a strictly higher priority (a lower number), the last in order first.

Each waiting sequence that can start in a step gets a slot. How many pages it needs only the admission policy knows:
while the first that waits is refused for lack of pages, every step takes back twice as much as the one before. What
made way is computed again (`preemption`). Knows the running set and the queue.
"""

from __future__ import annotations

from collections.abc import Callable

from toka_async.scheduler.admission.preemption import Preemption
from toka_async.scheduler.sequences.queues import PrefillQueue
from toka_async.scheduler.sequences.requests import PrefillTask, Request
from toka_async.scheduler.sequences.running import RunningSet


class Yielding:
    """Decides before a step is built what makes way. count_startable: of prompts' tokens, as a step can compute."""

    def __init__(
        self,
        running: RunningSet,
        queue: PrefillQueue,
        preemption: Preemption,
        count_startable: Callable[[], int],
    ) -> None:
        self._running = running
        self._queue = queue
        self._count_startable = count_startable
        self._preemption = preemption
        self._lacks_pages: Request | None = None
        self._num_yielding = 0  # sequences that made way for pages the last time

    def note_refused(self, task: PrefillTask) -> None:
        """Note that the first waiting task was refused in this step: if a slot is free, it lacks pages."""
        self._lacks_pages = task.request if self._running.num_free_slots > 0 else None

    def make_way(self) -> None:
        """Preempt sequences of lower priorities until the waiting work has what it needs."""
        refused, self._lacks_pages = self._lacks_pages, None
        first = self._find_first()
        lowest = None if first is None else self._running.table.lowest_priority()
        if first is None or lowest is None or lowest <= first.submit.priority:
            self._num_yielding = 0
            return
        self._num_yielding = max(1, 2 * self._num_yielding) if first is refused else 0
        table, num_taken = self._running.table, 0
        for seq in table.sort_last_first().tolist():
            priority = int(table.priority[seq])
            is_needed = num_taken < self._num_yielding or self._running.num_free_slots < self._count_wanted(priority)
            if priority <= first.submit.priority or not is_needed:
                return
            if table.holds[seq]:
                self._preemption.make_way(seq)
                num_taken += 1

    def _find_first(self) -> Request | None:
        task, forking = self._queue.first(), self._running.forking
        if task is None or (forking and forking[0].task.order < task.order):
            return forking[0].request if forking else None
        return task.request

    def _count_wanted(self, priority: int) -> int:
        """Slots for the sequences that come before a priority and can start in a step."""
        num_tasks, num_tokens = self._queue.count_before(priority)
        num_startable = self._count_startable()
        if num_tokens > num_startable:
            num_tasks = max(1, num_tasks * num_startable // num_tokens)
        forking = self._running.forking
        return num_tasks + sum(run.num_pending for run in forking if run.request.submit.priority < priority)
