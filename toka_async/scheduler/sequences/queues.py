"""The queue of prompts that wait: by priority, then arrival, then sample. Knows no pages and no steps."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from itertools import pairwise

from toka_async.scheduler.sequences.requests import PrefillTask

Entry = tuple[tuple[int, int, int], int, PrefillTask]  # order, serial number, task


class PrefillQueue:
    """A priority queue with removal in constant time: cancelled tasks are dropped when they surface.

    Most tasks come in order and stand in a line; the others are in a heap. A request lists its own waiting tasks
    (`Request.waiting`), one for each sample. While it holds, tasks of requests that have not begun stand aside, as if
    they were not here.
    """

    def __init__(self) -> None:
        self._line: deque[Entry] = deque()
        self._heap: list[Entry] = []
        self._serial = 0
        self._num_cancelled = 0
        self._num_tasks: Counter[int] = Counter()  # by priority
        self._num_tokens: Counter[int] = Counter()
        self._holds = False
        self._aside: dict[PrefillTask, None] = {}

    def __len__(self) -> int:
        return len(self._line) + len(self._heap) - self._num_cancelled

    def push(self, task: PrefillTask) -> None:
        assert task.sample not in task.request.waiting
        task.request.waiting[task.sample] = task
        self._enter(task)

    def _enter(self, task: PrefillTask) -> None:
        if self._holds and not task.request.has_begun:
            self._aside[task] = None
            return
        self._count(task, 1)
        self._serial += 1
        entry = (task.order, self._serial, task)
        if not self._line or entry > self._line[-1]:
            self._line.append(entry)
        else:
            heapq.heappush(self._heap, entry)

    def hold(self) -> None:
        """Set aside what has not begun, until `release`."""
        self._holds = True
        tasks = [task for _, _, task in (*self._line, *self._heap) if not task.cancelled]
        self._line.clear()
        self._heap.clear()
        self._num_cancelled = 0
        self._num_tasks.clear()
        self._num_tokens.clear()
        for task in sorted(tasks, key=lambda task: task.order):
            self._enter(task)

    def release(self) -> None:
        """Take back what was set aside."""
        self._holds = False
        tasks, self._aside = self._aside, {}
        for task in sorted(tasks, key=lambda task: task.order):
            self._enter(task)

    def first(self) -> PrefillTask | None:
        line, heap = self._line, self._heap
        while line and line[0][2].cancelled:
            line.popleft()
            self._num_cancelled -= 1
        while heap and heap[0][2].cancelled:
            heapq.heappop(heap)
            self._num_cancelled -= 1
        if self._is_in_line:
            return line[0][2]
        return heap[0][2] if heap else None

    @property
    def _is_in_line(self) -> bool:
        return bool(self._line) and (not self._heap or self._line[0] < self._heap[0])

    def pop(self) -> PrefillTask:
        task = self.first()
        assert task is not None
        if self._is_in_line:
            self._line.popleft()
        else:
            heapq.heappop(self._heap)
        del task.request.waiting[task.sample]
        self._count(task, -1)
        return task

    def count_before(self, priority: int) -> tuple[int, int]:
        """Count the tasks that come before all tasks of a priority, and the tokens of their prompts."""
        before = [each for each in self._num_tasks if each < priority]
        return sum(self._num_tasks[each] for each in before), sum(self._num_tokens[each] for each in before)

    def _count(self, task: PrefillTask, sign: int) -> None:
        priority = task.request.submit.priority
        self._num_tasks[priority] += sign
        self._num_tokens[priority] += sign * task.token_ids.size
        if not self._num_tasks[priority]:
            del self._num_tasks[priority], self._num_tokens[priority]

    def cancel(self, task: PrefillTask) -> None:
        assert not task.cancelled
        task.cancelled = True
        del task.request.waiting[task.sample]
        if task in self._aside:
            del self._aside[task]
            return
        self._count(task, -1)
        self._num_cancelled += 1
        if self._num_cancelled > 64 and self._num_cancelled > len(self):
            self._line = deque(entry for entry in self._line if not entry[2].cancelled)
            self._heap = [entry for entry in self._heap if not entry[2].cancelled]
            heapq.heapify(self._heap)
            self._num_cancelled = 0

    def check(self) -> None:
        tasks = [task for _, _, task in (*self._line, *self._heap) if not task.cancelled]
        assert all(entry < after for entry, after in pairwise(self._line))
        assert len(tasks) == len(self)
        assert self._num_tasks == Counter(task.request.submit.priority for task in tasks)
        assert self._num_tokens.total() == sum(task.token_ids.size for task in tasks)
        assert all(task.request.waiting[task.sample] is task for task in (*tasks, *self._aside))
        assert not (self._aside and not self._holds)
        assert not self._holds or all(task.request.has_begun for task in tasks)
