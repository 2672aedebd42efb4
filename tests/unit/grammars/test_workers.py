from __future__ import annotations

import gc
import threading
from queue import SimpleQueue

from toka_async.grammars.workers import Workers


def test_each_thread_does_its_tasks_in_order() -> None:
    workers, done = Workers(2), SimpleQueue[tuple[str, int]]()
    for number in range(6):
        workers.submit(number % 2, lambda number=number: done.put((threading.current_thread().name, number)))  # type: ignore[misc]
    found = [done.get(timeout=5) for _ in range(6)]
    assert [number for _, number in sorted(found)] == [0, 2, 4, 1, 3, 5]
    assert {name for name, _ in found} == {"masks-0", "masks-1"}


def test_threads_end_with_their_owner() -> None:
    workers, done = Workers(1), SimpleQueue[threading.Thread]()
    workers.submit(0, lambda: done.put(threading.current_thread()))
    thread = done.get(timeout=5)
    assert thread.is_alive()
    del workers
    gc.collect()
    thread.join(timeout=5)
    assert not thread.is_alive()
