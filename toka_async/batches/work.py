"""Runs batches: checks their input, gives their lines to the engine as it has room, brings them to their end.

The store keeps all that must survive: `start` goes on with every batch after a crash. This module knows no HTTP, and no
engine: `Answers` answers a line.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

from toka_async.batches.disk import StorageError
from toka_async.batches.ledger import Ledger
from toka_async.batches.lines import Checker, RawLine, read_lines
from toka_async.batches.quota import ANY, Quota
from toka_async.batches.records import FINAL, Batch, BatchRecord, DoneLine, Fault, Outcome
from toka_async.batches.results import Answered, cut_line, encode_line
from toka_async.batches.store import NotFoundError, Store
from toka_async.batches.writer import Writer
from toka_async.logs import request_id

logger = logging.getLogger(__name__)

T = TypeVar("T")
Ending: TypeAlias = "asyncio.Future[Outcome | None]"

MAX_RUNNING = 16  # batches of an owner at once; they take turns, line by line
READ_LINES, READ_BYTES = 512, 1 << 18  # that are read ahead of a batch
PREPARE_LINES = 32  # that are prepared at once: others have their turns of the event loop
WRITE_LINES = 4096  # that are ended at once when a batch is cut short
LONGEST_SLEEP = 60.0  # seconds until a batch with an expiry looks at the wall clock again
YIELD_EVERY = 8  # lines started before others get a turn
INTERNAL = Fault(
    code="internal_error", message="an error of this program has ended the batch; the server's log has the details"
)


class LineRequest(Protocol):
    """The request of a line, without the line's text."""

    async def enter(self) -> None:
        """Takes room in the engine, to be given back by `leave`; waits until there is some."""
        ...

    async def answer(self) -> Answered:
        """Asks the engine until it answers. To be called after `enter`."""
        ...

    def leave(self) -> None:
        """Gives back the room in the engine, if the line has any."""
        ...


class Answers(Protocol):
    """Answers lines of batches."""

    async def prepare(self, record: BatchRecord, raw: bytes) -> LineRequest | Answered:
        """Reads a line of the batch. Returns its request, or at once its answer if that is an error.

        Raises StorageError when this is not a line that was checked.
        """
        ...


Prepared: TypeAlias = tuple[int, int, LineRequest | Answered]  # a line's number, the byte after it, what it asks


@dataclass(frozen=True, slots=True)
class InputFileLimits:
    """The limits of an input file. model: see `Checker`."""

    max_lines: int
    max_line_bytes: int
    model: str = ""


@dataclass(slots=True)
class Running:
    """A batch that runs. ending: done when no further line is to start, with the outcome; None for a failed batch."""

    task: asyncio.Task[None]
    ending: Ending


class Batches:
    """All batches of one store.

    Args:
        executor: where files are read.
        on_progress: called when more of a batch is kept.
        on_end: called when a batch has ended.
    """

    def __init__(
        self,
        store: Store,
        writer: Writer,
        answers: Answers,
        limits: InputFileLimits,
        executor: Executor,
        on_progress: Callable[[Batch], None] = lambda _batch: None,
        on_end: Callable[[Batch], None] = lambda _batch: None,
    ) -> None:
        self.store = store
        self.writer = writer
        self.ledger = Ledger(store, writer, self._report_progress, self._fail)
        self._answers = answers
        self._limits = limits
        self._executor = executor
        self._on_progress = on_progress
        self._on_end = on_end
        self._running: dict[str, Running] = {}
        self._slots: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(MAX_RUNNING))
        self._passes: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(1))
        self._stopped = False

    @property
    def num_open(self) -> int:
        """The number of batches that have not ended."""
        return len(self._running)

    # ---- from outside ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Continues every batch that has not ended."""
        unfinished, self.store.unfinished = self.store.unfinished, []
        for record in unfinished:
            self.run(record)

    async def create(self, record: BatchRecord, quota: Quota = ANY) -> Batch:
        """Stores a batch and begins to run it. Raises NotFoundError, QuotaError or StorageError."""
        batch = await self.writer.run(lambda: self.store.add_batch(record, quota))
        self.run(record.drop_metadata())
        return batch

    async def cancel(self, batch_id: str, viewer: str | None = None) -> Batch:
        """Cancels a batch, unless it has ended. Raises NotFoundError or StorageError."""
        batch = await self.insist(lambda: self.store.end(batch_id, "cancelled", viewer))
        self._decide(batch_id, "cancelled")
        return batch

    async def insist(self, work: Callable[[], T]) -> T:
        """Runs work in the writer. On a full disk it may use the store's reserve, so it must not grow the store."""
        try:
            return await self.writer.run(work)
        except StorageError as error:
            if not error.full:
                raise
        return await self.writer.run(lambda: self.store.use_reserve(work))

    def run(self, record: BatchRecord) -> None:
        """Starts the task that brings a batch to its end."""
        if not self._stopped:
            ending: Ending = asyncio.get_running_loop().create_future()
            task = asyncio.create_task(self._run(record, ending))
            self._running[record.id] = Running(task, ending)
            task.add_done_callback(partial(self._forget, record.id))

    def suspend(self) -> None:
        """Stops all work. Lines without an answer are asked again after the next start."""
        self._stopped = True
        for running in self._running.values():
            running.task.cancel()

    async def stop(self) -> None:
        """Stops all work; returns when every answer that has come is on the disk."""
        self.suspend()
        await asyncio.gather(*(each.task for each in self._running.values()), return_exceptions=True)
        if self.ledger.trouble is None:
            await self.ledger.flush()
        await self.writer.close()
        self.store.close()

    def _decide(self, batch_id: str, outcome: Outcome | None) -> None:
        """Sets how a running batch ends, unless that is set already."""
        running = self._running.get(batch_id)
        if running is not None and not running.ending.done():
            running.ending.set_result(outcome)

    def _report_progress(self, batch: Batch) -> None:
        if batch.record.status in FINAL:
            self._decide(batch.record.id, None)
        self._on_progress(batch)

    def _fail(self, batch_id: str, error: BaseException) -> None:
        """Ends a batch with an error: its answers cannot be kept."""
        running = self._running.get(batch_id)
        if running is not None and not running.ending.done():
            running.ending.set_exception(error)

    def _forget(self, batch_id: str, task: asyncio.Task[None]) -> None:
        ending = self._running.pop(batch_id).ending
        if ending.done():
            ending.exception()  # nobody may have asked
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s goes on after the next start only: an error of this program", batch_id, exc_info=error)

    # ---- one batch ---------------------------------------------------------------------------------------------------

    async def _run(self, record: BatchRecord, ending: Ending) -> None:
        """Brings a batch to its end, also when an error of this program occurs."""
        try:
            await self._bring_to_end(record, ending)
        except Exception as error:
            logger.error("%s has failed by an error of this program", record.id, exc_info=error)
            await self.ledger.persist(lambda: self.store.fail(record.id, INTERNAL))
        try:
            batch = await self.ledger.persist(lambda: self.store.batch(record.id))
        except NotFoundError:  # it was deleted at once
            return
        if batch.record.in_progress_at is not None:
            for fault in batch.record.faults:
                logger.error("%s has failed: %s", record.id, fault.message)
        self._on_end(batch)

    async def _bring_to_end(self, record: BatchRecord, ending: Ending) -> None:
        if record.status == "validating":
            async with self._passes[record.owner]:
                record = await self._check(record, ending)
        if record.status == "in_progress":
            record = await self._ask_all(record, ending)
        if record.status not in FINAL:
            await self._finalize(record)

    async def _finalize(self, record: BatchRecord) -> None:
        """Ends every line that is left, and the batch."""
        try:
            if record.outcome != "completed":
                async with self._passes[record.owner]:
                    await self._cut_short(record)
        except StorageError as error:
            fault = make_unreadable_fault(error)
            await self.ledger.persist(lambda: self.store.fail(record.id, fault))
        else:
            await self.ledger.persist(lambda: self.store.finalize(record.id))

    async def _check(self, record: BatchRecord, ending: Ending) -> BatchRecord:
        """Checks the whole input file before its first line runs."""
        loop, path = asyncio.get_running_loop(), self.store.path(record.input_file_id)
        checker = Checker(path, self._limits.max_lines, self._limits.max_line_bytes, self._limits.model)
        try:
            while not checker.done and not ending.done():
                await loop.run_in_executor(self._executor, checker.step)
        except StorageError as error:
            checker.faults.append(make_unreadable_fault(error))
        batch = await self.ledger.persist(lambda: self.store.accept(record.id, checker.total, checker.faults))
        return batch.record.drop_metadata()

    async def _ask_all(self, record: BatchRecord, ending: Ending) -> BatchRecord:
        """Asks the lines that are left, until all are answered or the batch is to end."""
        lines = asyncio.create_task(self._ask_lines(record))
        try:
            either: set[asyncio.Future[Any]] = {lines, ending}
            await wait_until(either, record.expires_at, self.store.now)
        finally:
            was_done = lines.done()
            lines.cancel()
            await asyncio.gather(lines, return_exceptions=True)
        await self.ledger.flush()
        if was_done and (fault := find_lost_input(lines)) is not None:
            return (await self.ledger.persist(lambda: self.store.fail(record.id, fault))).record.drop_metadata()
        outcome = "completed" if was_done else ending.result() if ending.done() else "expired"
        if outcome is None:
            return (await self.ledger.persist(lambda: self.store.batch(record.id))).record.drop_metadata()
        return (await self.ledger.persist(lambda: self.store.end(record.id, outcome))).record.drop_metadata()

    async def _ask_lines(self, record: BatchRecord) -> None:
        """Asks the lines that are left. A cancellation takes back those without an answer.

        A line waits at two gates: for room on the disk, and for room in the engine. Only one line of a batch is at the
        gates at a time, so the batches of an owner share line by line.
        """
        async with self._slots[record.owner], asyncio.TaskGroup() as group:
            async for prepared in self._prepare_left(record, group):
                for number, end, request in prepared:
                    await self.ledger.wait_for_room()
                    if isinstance(request, Answered):
                        self._put(record, number, end, request)
                        continue
                    await request.enter()
                    task = group.create_task(self._ask(record, number, end, request))
                    task.add_done_callback(partial(leave, request))
                    if number % YIELD_EVERY == 0:
                        await asyncio.sleep(0)

    async def _prepare_left(self, record: BatchRecord, group: asyncio.TaskGroup) -> AsyncIterator[list[Prepared]]:
        """Yields the requests of the lines that are left, in groups. While a group waits, the next one is prepared."""
        ahead: list[asyncio.Task[Prepared]] = []
        behind: list[asyncio.Task[Prepared]] = []
        num_bytes = 0
        async for number, line in self._read_left(record):
            ahead.append(group.create_task(self._prepare(record, number, line)))
            num_bytes += len(line.raw)
            if len(ahead) == PREPARE_LINES or num_bytes >= READ_BYTES:
                if behind:
                    yield await asyncio.gather(*behind)
                ahead, behind, num_bytes = [], ahead, 0
        yield await asyncio.gather(*behind, *ahead)

    async def _prepare(self, record: BatchRecord, number: int, line: RawLine) -> Prepared:
        request_id.set(f"{record.id}-{number}")  # of this task alone
        return number, line.end, await self._answers.prepare(record, line.raw)

    async def _read_left(self, record: BatchRecord) -> AsyncIterator[tuple[int, RawLine]]:
        """Yields the lines that are left, with their numbers; reads them as they are needed."""
        loop, path = asyncio.get_running_loop(), self.store.path(record.input_file_id)
        for gap in await self.ledger.persist(lambda: self.store.gaps(record.id)):
            number, offset = gap.first, gap.offset
            while number < gap.stop:
                wanted = min(READ_LINES, gap.stop - number)
                lines = await loop.run_in_executor(self._executor, read_lines, path, offset, wanted, READ_BYTES)
                if not lines:
                    raise StorageError(f"the input file has lost lines: of {record.total} there are {number}")
                for line in lines:
                    yield number, line
                    number, offset = number + 1, line.end

    async def _ask(self, record: BatchRecord, number: int, end: int, request: LineRequest) -> None:
        request_id.set(f"{record.id}-{number}")  # of this task alone
        self._put(record, number, end, await request.answer())

    def _put(self, record: BatchRecord, number: int, end: int, answered: Answered) -> None:
        self.ledger.put(record.id, encode_line(record.id, number, end, answered))

    async def _cut_short(self, record: BatchRecord) -> None:
        """Gives each line that is left an answer that says why there is no other, unless the batch fails meanwhile."""
        if record.in_progress_at is None:
            return
        assert record.outcome is not None, "it ends for a reason"
        done: list[DoneLine] = []
        async for number, line in self._read_left(record):
            done.append(encode_line(record.id, number, line.end, cut_line(line.raw, record.outcome)))
            if len(done) == WRITE_LINES:
                batch = await self.ledger.persist(partial(self.store.finish_lines, record.id, done))
                if batch.record.status in FINAL:
                    return
                done = []
        if done:
            await self.ledger.persist(partial(self.store.finish_lines, record.id, done))


def leave(request: LineRequest, _task: asyncio.Task[None]) -> None:
    """Gives back a line's room when its task is done, or was cancelled before it could begin."""
    request.leave()


async def wait_until(futures: set[asyncio.Future[Any]], expires_at: int | None, now: Callable[[], float]) -> None:
    """Waits until one of the futures is done, or until `expires_at` by a clock that may jump meanwhile."""
    while True:
        left = None if expires_at is None else expires_at - now()
        if left is not None and left <= 0:
            return
        timeout = None if left is None else min(left, LONGEST_SLEEP)
        done, _ = await asyncio.wait(futures, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if done:
            return


def find_lost_input(task: asyncio.Task[None]) -> Fault | None:
    """Returns why a task that is done could not read its lines, if it could not. Raises any other error of the task."""
    try:
        task.result()
    except ExceptionGroup as errors:
        if errors.split(StorageError)[1] is not None:
            raise
        return make_unreadable_fault(errors.exceptions[0])
    return None


def make_unreadable_fault(error: BaseException) -> Fault:
    return Fault(code="input_file_unreadable", message=f"the input file cannot be read: {error}")
