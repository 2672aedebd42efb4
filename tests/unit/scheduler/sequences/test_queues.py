from __future__ import annotations

import gc

import numpy as np
import pytest

from tests.drivers.page_rank import submit
from toka_async.scheduler.sequences.queues import PrefillQueue
from toka_async.scheduler.sequences.requests import PrefillTask, Request


def task(arrival: int, priority: int = 0, sample: int = 0) -> PrefillTask:
    message = submit(arrival, [1, 2], priority=priority)
    return PrefillTask(Request(message, np.asarray([1, 2], np.int32), arrival, 1), sample, np.asarray([1, 2], np.int32))


def test_order_is_priority_then_arrival_then_sample() -> None:
    queue, request = PrefillQueue(), task(5).request
    prompt = request.prompt
    tasks = [
        PrefillTask(request, 2, prompt),
        task(3, priority=1),
        PrefillTask(request, 0, prompt),
        task(7, priority=-1),
        task(4),
    ]
    for entry in tasks:
        queue.push(entry)
    queue.check()
    assert [queue.pop() for _ in tasks] == [tasks[3], tasks[4], tasks[2], tasks[0], tasks[1]]
    assert queue.first() is None


def test_a_cancelled_job_never_surfaces() -> None:
    queue, tasks = PrefillQueue(), [task(i) for i in range(4)]
    for entry in tasks:
        queue.push(entry)
    queue.cancel(tasks[0])
    queue.cancel(tasks[2])
    assert len(queue) == 2
    assert queue.first() is tasks[1]
    assert [queue.pop(), queue.pop()] == [tasks[1], tasks[3]]
    assert len(queue) == 0
    queue.check()


def test_a_request_knows_its_waiting_jobs() -> None:
    queue, first = PrefillQueue(), task(1)
    second = PrefillTask(first.request, 3, first.token_ids)
    queue.push(first)
    queue.push(second)
    assert first.request.waiting == {0: first, 3: second}
    queue.pop()
    queue.cancel(second)
    assert first.request.waiting == {}


def test_a_job_is_cancelled_once() -> None:
    queue, entry = PrefillQueue(), task(1)
    queue.push(entry)
    queue.cancel(entry)
    with pytest.raises(AssertionError):
        queue.cancel(entry)


def test_many_cancels_keep_the_queue_small() -> None:
    queue, tasks = PrefillQueue(), [task(i) for i in range(5000)]
    for entry in tasks:
        queue.push(entry)
    for entry in tasks[:-1]:
        queue.cancel(entry)
    last = tasks[-1]
    del tasks, entry
    assert sum(type(each) is PrefillTask for each in gc.get_objects()) < 200, "the queue keeps those of few entries"
    assert queue.pop() is last
