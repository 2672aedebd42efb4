"""The queue of prompts that wait: by priority, then arrival, then sample. Knows no pages and no steps."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from itertools import pairwise

from toka_async.scheduler.sequences.requests import PrefillTask

Entry = tuple[tuple[int, int, int], int, PrefillTask]  # its order, a serial number, the job


class JobQueue:
    """A priority queue with removal in constant time (cancelled jobs are dropped when they surface).

    Most jobs come in order: they stand in a line, the others in a heap. A request knows its jobs that wait here
    (`Request.waiting`), one a sample.
    """

    def __init__(self) -> None:
        self._line: deque[Entry] = deque()
        self._heap: list[Entry] = []
        self._serial = 0
        self._num_cancelled = 0
        self._num_jobs: Counter[int] = Counter()  # by priority
        self._num_tokens: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._line) + len(self._heap) - self._num_cancelled

    def push(self, job: PrefillTask) -> None:
        assert job.sample not in job.request.waiting
        job.request.waiting[job.sample] = job
        self._count(job, 1)
        self._serial += 1
        entry = (job.order, self._serial, job)
        if not self._line or entry > self._line[-1]:
            self._line.append(entry)
        else:
            heapq.heappush(self._heap, entry)

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
        """The first of the line is the first of all."""
        return bool(self._line) and (not self._heap or self._line[0] < self._heap[0])

    def pop(self) -> PrefillTask:
        job = self.first()
        assert job is not None
        if self._is_in_line:
            self._line.popleft()
        else:
            heapq.heappop(self._heap)
        del job.request.waiting[job.sample]
        self._count(job, -1)
        return job

    def before(self, priority: int) -> tuple[int, int]:
        """Jobs that come before all of a priority, and the tokens of their prompts."""
        before = [each for each in self._num_jobs if each < priority]
        return sum(self._num_jobs[each] for each in before), sum(self._num_tokens[each] for each in before)

    def _count(self, job: PrefillTask, sign: int) -> None:
        priority = job.request.submit.priority
        self._num_jobs[priority] += sign
        self._num_tokens[priority] += sign * job.token_ids.size
        if not self._num_jobs[priority]:
            del self._num_jobs[priority], self._num_tokens[priority]

    def cancel(self, job: PrefillTask) -> None:
        assert not job.cancelled
        job.cancelled = True
        del job.request.waiting[job.sample]
        self._count(job, -1)
        self._num_cancelled += 1
        if self._num_cancelled > 64 and self._num_cancelled > len(self):
            self._line = deque(entry for entry in self._line if not entry[2].cancelled)
            self._heap = [entry for entry in self._heap if not entry[2].cancelled]
            heapq.heapify(self._heap)
            self._num_cancelled = 0

    def check(self) -> None:
        jobs = [job for _, _, job in (*self._line, *self._heap) if not job.cancelled]
        assert all(entry < after for entry, after in pairwise(self._line))
        assert len(jobs) == len(self)
        assert self._num_jobs == Counter(job.request.submit.priority for job in jobs)
        assert self._num_tokens.total() == sum(job.token_ids.size for job in jobs)
        assert all(job.request.waiting[job.sample] is job for job in jobs)
