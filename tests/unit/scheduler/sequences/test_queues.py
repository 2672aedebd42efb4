"""The queue of prompts."""

from __future__ import annotations

import time

import numpy as np
import pytest

from tests.drivers.page_rank import submit
from toka_async.scheduler.sequences.queues import JobQueue
from toka_async.scheduler.sequences.requests import PrefillTask, Request


def job(arrival: int, priority: int = 0, sample: int = 0) -> PrefillTask:
    message = submit(arrival, [1, 2], priority=priority)
    return PrefillTask(Request(message, np.asarray([1, 2], np.int32), arrival, 1), sample, np.asarray([1, 2], np.int32))


def test_order_is_priority_then_arrival_then_sample() -> None:
    queue, request = JobQueue(), job(5).request
    prompt = request.prompt
    jobs = [
        PrefillTask(request, 2, prompt),
        job(3, priority=1),
        PrefillTask(request, 0, prompt),
        job(7, priority=-1),
        job(4),
    ]
    for entry in jobs:
        queue.push(entry)
    queue.check()
    assert [queue.pop() for _ in jobs] == [jobs[3], jobs[4], jobs[2], jobs[0], jobs[1]]
    assert queue.first() is None


def test_a_cancelled_job_never_surfaces() -> None:
    queue, jobs = JobQueue(), [job(i) for i in range(4)]
    for entry in jobs:
        queue.push(entry)
    queue.cancel(jobs[0])
    queue.cancel(jobs[2])
    assert len(queue) == 2
    assert queue.first() is jobs[1]
    assert [queue.pop(), queue.pop()] == [jobs[1], jobs[3]]
    assert len(queue) == 0
    queue.check()


def test_a_request_knows_its_waiting_jobs() -> None:
    queue, first = JobQueue(), job(1)
    second = PrefillTask(first.request, 3, first.token_ids)
    queue.push(first)
    queue.push(second)
    assert first.request.waiting == {0: first, 3: second}
    queue.pop()
    queue.cancel(second)
    assert first.request.waiting == {}


def test_a_job_is_cancelled_once() -> None:
    queue, entry = JobQueue(), job(1)
    queue.push(entry)
    queue.cancel(entry)
    with pytest.raises(AssertionError):
        queue.cancel(entry)


def test_many_cancels_keep_the_queue_small_and_quick() -> None:
    queue, jobs = JobQueue(), [job(i) for i in range(5000)]
    for entry in jobs:
        queue.push(entry)
    start = time.perf_counter()
    for entry in jobs[:-1]:
        queue.cancel(entry)
    assert time.perf_counter() - start < 0.5
    assert len(queue._heap) < 200
    assert queue.pop() is jobs[-1]
