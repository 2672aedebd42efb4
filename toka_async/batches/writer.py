"""The one thread that reads and writes the database.

Work that arrives while it is busy becomes one transaction, so any number of callers wait for the disk once.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from toka_async.batches.database import is_full
from toka_async.batches.disk import StorageError

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_GROUP = 256  # tasks in a transaction
OF_THE_DISK = (sqlite3.OperationalError, sqlite3.DatabaseError)  # subclasses of these are our own errors


@dataclass(slots=True)
class WriteTask:
    """Work for the thread, and its result."""

    work: Callable[[], Any]
    future: asyncio.Future[Any] | None = None
    result: Any = None
    error: Exception | None = None

    def settle(self) -> None:
        if self.future is None or self.future.done():  # the caller has left
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)


class Transactions:
    """Runs tasks on a connection that nobody else uses.

    committed: called after a transaction; its errors are logged. forget: called when a transaction, or one task's part
    of it, was undone.
    """

    def __init__(
        self, connection: sqlite3.Connection, committed: Callable[[], None], forget: Callable[[], None]
    ) -> None:
        self._connection = connection
        self._committed = committed
        self._forget = forget

    def do(self, group: list[WriteTask]) -> None:
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            for job in group:
                self._do_one(job)
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            self._undo("ROLLBACK")
            for job in group:
                job.error = job.error or storage_error(error)
            return
        try:
            self._committed()
        except StorageError as error:  # the next start removes the files that are left
            logger.warning("a file was not removed: %s", error)

    def _do_one(self, job: WriteTask) -> None:
        """Runs a task; one that fails leaves nothing behind."""
        self._connection.execute("SAVEPOINT job")
        try:
            job.result = job.work()
        except Exception as error:
            job.error = storage_error(error) if type(error) in OF_THE_DISK else error
            self._undo("ROLLBACK TO job")
        self._connection.execute("RELEASE job")

    def _undo(self, statement: str) -> None:
        self._forget()
        if self._connection.in_transaction:  # SQLite itself may have ended it
            self._connection.execute(statement)


class Writer:
    """Runs work in transactions, in the order of arrival, for the event loop in which it is made."""

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions
        self._loop = asyncio.get_running_loop()
        self._queue: SimpleQueue[WriteTask | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)
        self._thread.start()

    async def run(self, work: Callable[[], T]) -> T:
        """Returns the result of `work` once it is on the disk. Raises StorageError when nothing of it is."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._queue.put(WriteTask(work, future))
        return await future

    async def close(self) -> None:
        """Waits for earlier work."""
        self._queue.put(None)
        await self._loop.run_in_executor(None, self._thread.join)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            group, ends = self._group(job)
            self._transactions.do(group)
            self._loop.call_soon_threadsafe(settle, group)
            if ends:
                return

    def _group(self, first: WriteTask) -> tuple[list[WriteTask], bool]:
        """Returns the tasks that wait now, and whether they are the last."""
        group = [first]
        while len(group) < MAX_GROUP:
            try:
                job = self._queue.get_nowait()
            except Empty:
                break
            if job is None:
                return group, True
            group.append(job)
        return group, False


def settle(jobs: list[WriteTask]) -> None:
    for job in jobs:
        job.settle()


def storage_error(error: Exception) -> StorageError:
    return StorageError(f"the database: {error}", full=isinstance(error, sqlite3.Error) and is_full(error))
