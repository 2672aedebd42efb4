"""Threads that have a queue each.

A pool would make a future and a lock for each task. That is work under the interpreter's lock, for which all threads
wait.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from weakref import finalize

Task = Callable[[], None]  # which raises nothing
_Tasks = SimpleQueue[Task | None]


class Workers:
    """So many threads, each of which does its tasks in order. They start with their first task and end with this."""

    def __init__(self, number: int) -> None:
        self._queues: list[_Tasks] = [SimpleQueue() for _ in range(number)]
        self._threads: list[Thread | None] = [None] * number
        finalize(self, _end, self._queues)

    def submit(self, number: int, task: Task) -> None:
        """Gives a task to one of them."""
        self._queues[number].put(task)
        if self._threads[number] is None:
            thread = Thread(target=_work, args=(self._queues[number],), name=f"masks-{number}", daemon=True)
            self._threads[number] = thread
            thread.start()


def _work(tasks: _Tasks) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # what it holds may be what ends the thread


def _end(queues: list[_Tasks]) -> None:
    for queue in queues:
        queue.put(None)
