"""Collects lines that have ended while the disk is busy, and keeps them in memory while it is full.

Knows the store, not what a line is.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable
from contextvars import Context
from functools import partial
from typing import TypeVar

from toka_async.batches.disk import StorageError
from toka_async.batches.records import Batch, DoneLine
from toka_async.batches.store import Store
from toka_async.batches.writer import Writer

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_BYTES = 64 << 20  # results in memory that stop further lines from running
FIRST_WAIT, LONGEST_WAIT = 1.0, 30.0  # seconds until the next try of a disk that failed


class Ledger:
    """The lines of all batches that have ended and are not on the disk yet.

    on_progress: called when more of a batch is on the disk. on_error: called when a batch's lines cannot be kept
    because of an error of this program. trouble: why nothing can be kept at the moment; None otherwise. num_completed,
    num_failed: lines that were put.
    """

    def __init__(
        self,
        store: Store,
        writer: Writer,
        on_progress: Callable[[Batch], None],
        on_error: Callable[[str, BaseException], None],
    ) -> None:
        self.trouble: StorageError | None = None
        self.num_completed = self.num_failed = 0
        self._store = store
        self._writer = writer
        self._on_progress = on_progress
        self._on_error = on_error
        self._lines: defaultdict[str, list[DoneLine]] = defaultdict(list)
        self._num_bytes = 0
        self._num_kept = 0
        self._round = asyncio.Event()  # set when the lines that are on their way to the disk are there
        self._task: asyncio.Task[None] | None = None
        self._has_room = asyncio.Event()
        self._has_room.set()

    def put(self, batch_id: str, line: DoneLine) -> None:
        """Takes a line, which goes to the disk sooner or later."""
        self._lines[batch_id].append(line)
        self.num_completed += not line.failed
        self.num_failed += line.failed
        self._num_bytes += len(line.data)
        if self._num_bytes >= MAX_BYTES:
            self._has_room.clear()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), context=Context())  # not this line's context: it serves all

    async def wait_for_room(self) -> None:
        """Waits until memory can hold more results."""
        await self._has_room.wait()

    async def flush(self) -> None:
        """Waits until everything that was put before is on the disk; lines that come meanwhile do not count."""
        num_put = self.num_completed + self.num_failed
        while self._task is not None and self._num_kept < num_put:
            either = self._task, asyncio.create_task(self._round.wait())
            try:
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            finally:
                either[1].cancel()
            if either[0].done():
                either[0].result()

    async def persist(self, work: Callable[[], T]) -> T:
        """Runs `work` in the writer, again and again until the disk takes it."""
        wait = FIRST_WAIT
        while True:
            try:
                result = await self._writer.run(work)
            except StorageError as error:
                self._fail(error)
                await asyncio.sleep(wait)
                wait = min(2 * wait, LONGEST_WAIT)
            else:
                self._recover()
                return result

    async def _run(self) -> None:
        while self._lines:
            lines, self._lines = self._lines, defaultdict(list)
            works = [
                self.persist(partial(self._store.finish_lines, batch_id, each)) for batch_id, each in lines.items()
            ]
            kept = await asyncio.gather(*works, return_exceptions=True)
            for batch_id, result in zip(lines, kept, strict=True):
                if isinstance(result, BaseException):
                    self._on_error(batch_id, result)
                else:
                    self._on_progress(result)
            self._num_kept += sum(map(len, lines.values()))
            self._num_bytes -= sum(len(line.data) for each in lines.values() for line in each)
            if self._num_bytes < MAX_BYTES:
                self._has_room.set()
            self._round.set()
            self._round = asyncio.Event()
        self._task = None

    def _fail(self, error: StorageError) -> None:
        if self.trouble is None:
            logger.error("batches wait for the disk: %s", error)
        self.trouble = error
        self._has_room.clear()

    def _recover(self) -> None:
        if self.trouble is not None:
            logger.info("batches go on: the disk takes results again")
            self.trouble = None
        if self._num_bytes < MAX_BYTES:
            self._has_room.set()
