"""The queue of prompts that wait: by priority, then arrival, then sample. Knows no pages and no steps."""

from __future__ import annotations

import heapq

from toka_async.scheduler.requests import Job


class JobQueue:
    """A priority queue with removal in constant time (cancelled jobs are dropped when they surface).

    A request knows its jobs that wait here (`Request.waiting`), one a sample.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int, int], int, Job]] = []
        self._serial = 0
        self._num_cancelled = 0

    def __len__(self) -> int:
        return len(self._heap) - self._num_cancelled

    def push(self, job: Job) -> None:
        assert job.sample not in job.request.waiting
        job.request.waiting[job.sample] = job
        self._serial += 1
        heapq.heappush(self._heap, (job.order, self._serial, job))

    def first(self) -> Job | None:
        while self._heap and self._heap[0][2].cancelled:
            heapq.heappop(self._heap)
            self._num_cancelled -= 1
        return self._heap[0][2] if self._heap else None

    def pop(self) -> Job:
        job = self.first()
        assert job is not None
        heapq.heappop(self._heap)
        del job.request.waiting[job.sample]
        return job

    def cancel(self, job: Job) -> None:
        assert not job.cancelled
        job.cancelled = True
        del job.request.waiting[job.sample]
        self._num_cancelled += 1
        if self._num_cancelled > 64 and self._num_cancelled * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if not entry[2].cancelled]
            heapq.heapify(self._heap)
            self._num_cancelled = 0

    def check(self) -> None:
        jobs = [job for _, _, job in self._heap if not job.cancelled]
        assert len(jobs) == len(self)
        assert all(job.request.waiting[job.sample] is job for job in jobs)
