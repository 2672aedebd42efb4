"""Runs batches: checks their input, gives their lines to the engine as it has room, brings them to their end.

All that must survive is in the store: whatever of this is lost by a crash is found again by `start`. Knows no HTTP;
what answers a line is given (`Answers`).
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
from toka_async.batches.window import Window
from toka_async.batches.writer import Writer
from toka_async.logs import request_id

logger = logging.getLogger(__name__)

T = TypeVar("T")
Ending: TypeAlias = "asyncio.Future[Outcome | None]"

MAX_RUNNING = 16  # batches of an owner at once; they take turns, line by line
READ_LINES, READ_BYTES = 512, 1 << 18  # that are read ahead of a batch
WRITE_LINES = 4096  # that are ended at once when a batch is cut short
MAX_TRIES = 3  # of a line with which the engine stopped
LONGEST_SLEEP = 60.0  # seconds until a batch with an expiry looks at the wall clock again
YIELD_EVERY = 8  # lines started before others get a turn
INTERNAL = Fault(
    code="internal_error", message="an error of this program has ended the batch; the server's log has the details"
)


class TryLaterError(Exception):
    """The engine does not take the line now, and that is not the line's fault. `stopped`: it had begun."""

    def __init__(self, message: str, *, stopped: bool) -> None:
        super().__init__(message)
        self.stopped = stopped


class LineRequest(Protocol):
    """A line that can be asked. cost: samples."""

    @property
    def cost(self) -> int: ...

    async def answer(self) -> Answered:
        """Raises TryLaterError."""
        ...


class Answers(Protocol):
    """What lines are given to."""

    async def question(self, record: BatchRecord, raw: bytes) -> LineRequest | Answered:
        """What a line of the batch asks; the error when it asks nothing that can be answered.

        Waits while lines of the batch's owner wait for room.

        Raises:
            StorageError: it is no line that was checked.
        """
        ...


@dataclass(frozen=True, slots=True)
class InputFileLimits:
    """Of an input file. model: see `Checker`."""

    max_lines: int
    max_line_bytes: int
    model: str = ""


@dataclass(slots=True)
class Running:
    """A batch that is worked on. ending: set when no line is to be started any more, with why; None: it has failed."""

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
        window: Window,
        limits: InputFileLimits,
        executor: Executor,
        on_progress: Callable[[Batch], None] = lambda _batch: None,
        on_end: Callable[[Batch], None] = lambda _batch: None,
    ) -> None:
        self.store = store
        self.writer = writer
        self.window = window
        self.ledger = Ledger(store, writer, self._progressed, self._broke)
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
        """Batches that have not ended."""
        return len(self._running)

    # ---- from outside ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Goes on with every batch that has not ended."""
        unfinished, self.store.unfinished = self.store.unfinished, []
        for record in unfinished:
            self.run(record)

    async def create(self, record: BatchRecord, quota: Quota = ANY) -> Batch:
        """Raises NotFoundError, QuotaError or StorageError."""
        batch = await self.writer.run(lambda: self.store.add_batch(record, quota))
        self.run(record.without_metadata())
        return batch

    async def cancel(self, batch_id: str, viewer: str | None = None) -> Batch:
        """One that has ended stays as it is. Raises NotFoundError or StorageError."""
        batch = await self.insist(lambda: self.store.end(batch_id, "cancelled", viewer))
        self._decide(batch_id, "cancelled")
        return batch

    async def insist(self, work: Callable[[], T]) -> T:
        """As the writer's `run`, on a full disk with the store's reserve: for what makes room, or takes no more."""
        try:
            return await self.writer.run(work)
        except StorageError as error:
            if not error.full:
                raise
        return await self.writer.run(lambda: self.store.with_reserve(work))

    def run(self, record: BatchRecord) -> None:
        """Works on it until it has ended."""
        if not self._stopped:
            ending: Ending = asyncio.get_running_loop().create_future()
            task = asyncio.create_task(self._run(record, ending))
            self._running[record.id] = Running(task, ending)
            task.add_done_callback(partial(self._left, record.id))

    def suspend(self) -> None:
        """Starts nothing more and takes back what runs: it is asked again after the next start."""
        self._stopped = True
        for running in self._running.values():
            running.task.cancel()

    async def stop(self) -> None:
        """As `suspend`; returns when all that has ended is kept."""
        self.suspend()
        await asyncio.gather(*(each.task for each in self._running.values()), return_exceptions=True)
        if self.ledger.trouble is None:
            await self.ledger.flush()
        await self.writer.close()
        self.store.close()

    def _decide(self, batch_id: str, outcome: Outcome | None) -> None:
        """How it ends; the first that is decided holds."""
        running = self._running.get(batch_id)
        if running is not None and not running.ending.done():
            running.ending.set_result(outcome)

    def _progressed(self, batch: Batch) -> None:
        if batch.record.status in FINAL:
            self._decide(batch.record.id, None)
        self._on_progress(batch)

    def _broke(self, batch_id: str, error: BaseException) -> None:
        """What was answered of it cannot be kept."""
        running = self._running.get(batch_id)
        if running is not None and not running.ending.done():
            running.ending.set_exception(error)

    def _left(self, batch_id: str, task: asyncio.Task[None]) -> None:
        ending = self._running.pop(batch_id).ending
        if ending.done():
            ending.exception()  # nobody may have asked
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s goes on after the next start only: an error of this program", batch_id, exc_info=error)

    # ---- one batch ---------------------------------------------------------------------------------------------------

    async def _run(self, record: BatchRecord, ending: Ending) -> None:
        """To its end, whatever happens."""
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
        """Every line ends."""
        try:
            if record.outcome != "completed":
                async with self._passes[record.owner]:
                    await self._cut_short(record)
        except StorageError as error:
            fault = unreadable(error)
            await self.ledger.persist(lambda: self.store.fail(record.id, fault))
        else:
            await self.ledger.persist(lambda: self.store.finalize(record.id))

    async def _check(self, record: BatchRecord, ending: Ending) -> BatchRecord:
        """Goes through the input file before anything of it runs."""
        loop, path = asyncio.get_running_loop(), self.store.path(record.input_file_id)
        checker = Checker(path, self._limits.max_lines, self._limits.max_line_bytes, self._limits.model)
        try:
            while not checker.done and not ending.done():
                await loop.run_in_executor(self._executor, checker.step)
        except StorageError as error:
            checker.faults.append(unreadable(error))
        batch = await self.ledger.persist(lambda: self.store.accept(record.id, checker.total, checker.faults))
        return batch.record.without_metadata()

    async def _ask_all(self, record: BatchRecord, ending: Ending) -> BatchRecord:
        """Asks what is left, until all is answered or there is a reason to end."""
        lines = asyncio.create_task(self._ask_lines(record))
        try:
            either: set[asyncio.Future[Any]] = {lines, ending}
            await first_before(either, record.expires_at, self.store.now)
        finally:
            was_done = lines.done()
            lines.cancel()
            await asyncio.gather(lines, return_exceptions=True)
        await self.ledger.flush()
        if was_done and (fault := lost_input(lines)) is not None:
            return (await self.ledger.persist(lambda: self.store.fail(record.id, fault))).record.without_metadata()
        outcome = "completed" if was_done else ending.result() if ending.done() else "expired"
        if outcome is None:
            return (await self.ledger.persist(lambda: self.store.batch(record.id))).record.without_metadata()
        return (await self.ledger.persist(lambda: self.store.end(record.id, outcome))).record.without_metadata()

    async def _ask_lines(self, record: BatchRecord) -> None:
        """Leaving it by a cancellation takes back what has not been answered."""
        num_started = 0
        async with self._slots[record.owner], asyncio.TaskGroup() as group:
            async for number, line in self._left_lines(record):
                await self.ledger.room()
                question = await self._answers.question(record, line.raw)
                if isinstance(question, Answered):
                    self._put(record, number, line, question)
                else:
                    await self.window.enter(record.owner, question.cost)
                    task = group.create_task(self._ask(record, number, line, question))
                    task.add_done_callback(partial(self._leave, question.cost))
                num_started += 1
                if num_started % YIELD_EVERY == 0:
                    await asyncio.sleep(0)

    async def _left_lines(self, record: BatchRecord) -> AsyncIterator[tuple[int, RawLine]]:
        """The lines that are not done, with their numbers, read as they are needed."""
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

    async def _ask(self, record: BatchRecord, number: int, line: RawLine, question: LineRequest) -> None:
        """Asks until there is an answer."""
        request_id.set(f"{record.id}-{number}")  # of this task alone
        num_tries = 0
        while True:
            try:
                answered = await question.answer()
                break
            except TryLaterError as error:
                num_tries += error.stopped
                if num_tries == MAX_TRIES:
                    answered = Answered.from_error(line.raw, "engine_stopped", str(error))
                    break
                await self.window.changed()
        self._put(record, number, line, answered)

    def _leave(self, cost: int, _line: asyncio.Task[None]) -> None:
        """A line is over, also one that was cancelled before it could begin."""
        self.window.leave(cost)

    def _put(self, record: BatchRecord, number: int, line: RawLine, answered: Answered) -> None:
        self.ledger.put(record.id, encode_line(record.id, number, line.end, answered))

    async def _cut_short(self, record: BatchRecord) -> None:
        """Lines that are left without an answer get one that says why, unless the batch fails on it."""
        if record.in_progress_at is None:
            return
        assert record.outcome is not None, "it ends for a reason"
        done: list[DoneLine] = []
        async for number, line in self._left_lines(record):
            done.append(encode_line(record.id, number, line.end, cut_line(line.raw, record.outcome)))
            if len(done) == WRITE_LINES:
                batch = await self.ledger.persist(partial(self.store.finish_lines, record.id, done))
                if batch.record.status in FINAL:
                    return
                done = []
        if done:
            await self.ledger.persist(partial(self.store.finish_lines, record.id, done))


async def first_before(futures: set[asyncio.Future[Any]], expires_at: int | None, now: Callable[[], float]) -> None:
    """Waits until one of them is done, or until it is `expires_at` by a clock that may jump meanwhile."""
    while True:
        left = None if expires_at is None else expires_at - now()
        if left is not None and left <= 0:
            return
        timeout = None if left is None else min(left, LONGEST_SLEEP)
        done, _ = await asyncio.wait(futures, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if done:
            return


def lost_input(task: asyncio.Task[None]) -> Fault | None:
    """Why a task that is done could not read its lines, if so. Raises what else it has raised."""
    try:
        task.result()
    except ExceptionGroup as errors:
        if errors.split(StorageError)[1] is not None:
            raise
        return unreadable(errors.exceptions[0])
    return None


def unreadable(error: BaseException) -> Fault:
    return Fault(code="input_file_unreadable", message=f"the input file cannot be read: {error}")
