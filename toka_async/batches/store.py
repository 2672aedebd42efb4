"""Files and batches on the disk: the operations on them, as transactions of one thread (`Writer`).

The order that makes a crash at any moment harmless: results are written behind the committed length of a batch's files,
then these are synced, then one transaction says how long they are now and which lines are in them. What is written and
not committed is cut off by the next write or at the end. A new file is synced under its name before a transaction
speaks of it; a removed one is forgotten by a transaction before it is unlinked. At the start the store removes what no
transaction knows if it has a name that the store gives; nothing else is ever removed, and a folder with foreign files
is refused. A batch whose result files are not what was committed has failed. Knows no event loop, no HTTP and no
engine.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from toka_async.batches.damage import ResultFile, clip_progress, salvage
from toka_async.batches.database import Database, Order, database_errors
from toka_async.batches.disk import Disk
from toka_async.batches.folder import StoreFolder, is_name
from toka_async.batches.line_ranges import Gap, LineRanges
from toka_async.batches.quota import ANY, Quota
from toka_async.batches.records import (
    FINAL,
    Batch,
    BatchProgress,
    BatchRecord,
    DoneLine,
    Fault,
    FileRecord,
    Outcome,
    may_see,
)
from toka_async.batches.reserve import Reserve

logger = logging.getLogger(__name__)

T = TypeVar("T")

OUTPUT_PURPOSE = "batch_output"


class NotFoundError(Exception):
    """There is no such file or batch."""


class InUseError(Exception):
    """A file is the input of an open batch, or the batch itself is open; has the batch's id."""


@dataclass(slots=True)
class Work:
    """A batch's progress, as in the database."""

    progress: BatchProgress
    spans: LineRanges


class Store:
    """One folder, whose lock is held until `close` or the end of the process.

    folder: made if missing. disk: changes the files. places: paths of files, by id, outside of the folder. now: seconds
    since 1970. Raises StorageError when the folder cannot be used or another process uses it.
    """

    def __init__(
        self,
        folder: Path,
        now: Callable[[], float],
        disk: Disk | None = None,
        places: Mapping[str, Path] | None = None,
    ) -> None:
        self.now = now
        self.unfinished: list[BatchRecord] = []  # batches that were open when the store was opened
        self._disk = disk or Disk()
        self._places = places or {}
        self._work: dict[str, Work] = {}
        self._unlinked: list[Path] = []  # files that the running transaction removes
        self.folder = StoreFolder(folder)
        self._lock = self.folder.claim()
        with ExitStack() as opened, database_errors(self.folder.database):
            opened.callback(os.close, self._lock)
            self.database = Database(self.folder.database)
            opened.callback(self.database.close)
            self.folder.make_folders()
            self._sweep(self._find_unfinished())
            self._reserve = Reserve(self.folder.reserve)
            self._opened = opened.pop_all()

    def close(self) -> None:
        self._opened.close()

    def path(self, file_id: str) -> Path:
        return self._places.get(file_id) or self.folder.files / file_id

    def after_commit(self) -> None:
        """Unlinks what the last transaction has forgotten."""
        self._unlink()
        self._reserve.refill()

    def use_reserve(self, work: Callable[[], T]) -> T:
        """Runs `work` so that a full disk can take it, as a transaction of its own."""
        self._reserve.give()
        return work()

    def _unlink(self) -> None:
        unlinked, self._unlinked = self._unlinked, []
        for path in unlinked:
            self._disk.remove(path)

    def forget(self) -> None:
        """Drops the state of a transaction that was undone, wholly or in part."""
        self._work.clear()
        self._unlinked.clear()

    # ---- files -------------------------------------------------------------------------------------------------------

    def add_file(self, record: FileRecord, upload: Path, quota: Quota = ANY) -> None:
        """Turns a complete and synced upload into a file. Raises QuotaError."""
        self.remove_expired()
        num_files, num_bytes = self.database.count_files(record.owner)
        quota.check_files(num_files + 1, num_bytes + record.bytes)
        self._disk.rename(upload, self.path(record.id))
        self.database.add_file(record)

    def file(self, file_id: str, viewer: str | None = None) -> FileRecord:
        """Raises NotFoundError, also for an expired file or one that the viewer may not see."""
        record = self.database.file(file_id)
        if record is None or (record.expires_at is not None and record.expires_at <= self.now()):
            raise NotFoundError(file_id)
        if not is_name(record.id):
            raise NotFoundError(file_id)
        if not may_see(record.owner, viewer):
            raise NotFoundError(file_id)
        return record

    def files(
        self, purpose: str | None, after: str | None, order: Order, limit: int, viewer: str | None = None
    ) -> list[FileRecord]:
        """Returns the files that the viewer may see. Raises NotFoundError when there is no file `after`."""
        records = self.database.files(purpose, after, order, limit, int(self.now()), viewer)
        if records is None:
            raise NotFoundError(after)
        return records

    def remove_file(self, file_id: str, viewer: str | None = None) -> None:
        """Raises NotFoundError or InUseError."""
        self.file(file_id, viewer)
        if reader := self.database.find_reader(file_id):
            raise InUseError(reader)
        self._drop(file_id)

    def remove_expired(self) -> None:
        """Removes expired files, except inputs of open batches, and batches whose results have expired."""
        now = int(self.now())
        for file_id in self.database.list_expired_files(now):
            if not self.database.find_reader(file_id):
                self._drop(file_id)
        self.database.remove_expired_batches(now)

    def _drop(self, file_id: str) -> None:
        self.database.remove_file(file_id)
        if is_name(file_id):
            self._unlinked.append(self.path(file_id))

    def _find_unfinished(self) -> set[str] | None:
        """Fills `unfinished`, and ends batches whose progress the database has lost.

        Returns the ids of the open batches' result files; None when the database has lost those of one.
        """
        file_ids: set[str] | None = set()
        lost: list[Batch] = []
        for batch in self.database.open_batches():
            record = batch.record
            if not record.output_id:
                logger.error("%s cannot go on: its record in the database is damaged; delete it", record.id)
                file_ids = None
            elif record.status in FINAL or batch.progress.is_broken:
                lost.append(batch)
            else:
                self.unfinished.append(record.drop_metadata())
            if file_ids is not None:
                file_ids |= {record.output_id, record.error_id}
        for batch in lost:
            with self.database.transaction():
                self._end_lost(batch)
        return file_ids

    def _end_lost(self, batch: Batch) -> None:
        """Ends a batch of unknown done lines; what was answered can be read."""
        if batch.record.status in FINAL:
            self._put(batch, batch.record)
            return
        logger.error("%s cannot go on: its progress in the database is damaged", batch.record.id)
        message = "the server's database has lost which lines were done; make a new batch of those without an answer"
        progress = salvage(self._results(Batch(batch.record, BatchProgress())))
        self._fail(Batch(batch.record, progress), (Fault(code="progress_damaged", message=message),))

    def _sweep(self, known: set[str] | None) -> None:
        """Removes files that no transaction knows, after a crash. known: ids of batches' files, None if incomplete."""
        self.remove_expired()
        for path in self.folder.list_leftovers(None if known is None else known.union(self.database.file_ids())):
            self._disk.remove(path)
        self._unlink()

    # ---- batches -----------------------------------------------------------------------------------------------------

    def add_batch(self, record: BatchRecord, quota: Quota = ANY) -> Batch:
        """Raises NotFoundError without such an input file, or QuotaError."""
        quota.check_batches(self.database.num_open_batches(record.owner) + 1)
        if record.input_file_id not in self._places:
            self.file(record.input_file_id)
        self.database.add_batch(record)
        return Batch(record, BatchProgress())

    def batch(self, batch_id: str, viewer: str | None = None) -> Batch:
        """Raises NotFoundError, also for a batch that the viewer may not see."""
        batch = self.database.batch(batch_id)
        if batch is None or not may_see(batch.record.owner, viewer):
            raise NotFoundError(batch_id)
        return batch

    def batches(self, after: str | None, limit: int, viewer: str | None = None) -> list[Batch]:
        """Returns the batches that the viewer may see, newest first. Raises NotFoundError without a batch `after`."""
        batches = self.database.batches(after, limit, viewer)
        if batches is None:
            raise NotFoundError(after)
        return batches

    def remove_batch(self, batch_id: str, viewer: str | None = None) -> None:
        """Forgets a batch that has ended; its files stay. Raises NotFoundError or InUseError."""
        if self.batch(batch_id, viewer).record.status not in FINAL:
            raise InUseError(batch_id)
        self.database.remove_batch(batch_id)

    def accept(self, batch_id: str, total: int, faults: Sequence[Fault]) -> Batch:
        """Begins or fails a batch after the check of its input file. A batch that was cancelled meanwhile stays so."""
        batch = self.batch(batch_id)
        if batch.record.status != "validating":
            return batch
        now = int(self.now())
        if faults:
            return self._put(batch, batch.record.refuse(tuple(faults), now))
        for file_id in (batch.record.output_id, batch.record.error_id):
            self._disk.create(self.path(file_id))
        return self._put(batch, batch.record.accept(total, now))

    def end(self, batch_id: str, outcome: Outcome, viewer: str | None = None) -> Batch:
        """Decides a batch's end: no further line starts. A batch whose end is decided stays as it is.

        Raises NotFoundError as `batch` does.
        """
        batch = self.batch(batch_id, viewer)
        if batch.record.status in FINAL or batch.record.outcome is not None:
            return batch  # without a write, for which there may be no room
        return self._put(batch, batch.record.begin_end(outcome, int(self.now())))

    def fail(self, batch_id: str, fault: Fault) -> Batch:
        """Fails a batch that cannot go on: what was answered until now can be read, the rest is lost."""
        batch = self.batch(batch_id)
        return batch if batch.record.status in FINAL else self._fail(batch, (fault, *self._damage(batch)))

    def finish_lines(self, batch_id: str, lines: Sequence[DoneLine]) -> Batch:
        """Stores lines that have ended and marks them as done, together or not at all.

        If the batch's files were damaged, the batch fails instead, and these lines are lost; so are lines that come
        after its end. Raises StorageError when nothing was stored.
        """
        batch = self.batch(batch_id)
        if batch.record.status in FINAL:
            return batch
        if faults := self._damage(batch):
            return self._fail(batch, faults)
        record, work = batch.record, self._load(batch_id)
        progress = msgspec.structs.replace(work.progress)
        output = b"".join(each.data for each in lines if not each.failed)
        errors = b"".join(each.data for each in lines if each.failed)
        if output:
            self._disk.append(self.path(record.output_id), progress.output_bytes, output)
        if errors:
            self._disk.append(self.path(record.error_id), progress.error_bytes, errors)
        progress.output_bytes += len(output)
        progress.error_bytes += len(errors)
        for each in lines:
            work.spans.add(each.line, each.end)
            progress.completed += not each.failed
            progress.failed += each.failed
            progress.input_tokens += each.input_tokens
            progress.cached_tokens += each.cached_tokens
            progress.output_tokens += each.output_tokens
        progress.spans = work.spans.encode()
        assert work.spans.num_done == progress.completed + progress.failed
        self.database.put_progress(batch_id, progress)
        work.progress = progress
        return Batch(record, progress)

    def gaps(self, batch_id: str) -> list[Gap]:
        """Returns the lines that are left of a batch whose lines were counted."""
        return list(self._load(batch_id).spans.gaps(self.batch(batch_id).record.total))

    def finalize(self, batch_id: str) -> Batch:
        """Ends a batch whose lines have all ended: its files are cut to what was committed; empty ones vanish.

        If the files were damaged, the batch fails instead.
        """
        batch = self.batch(batch_id)
        record, progress = batch.record, batch.progress
        if record.status in FINAL:
            return batch
        assert progress.completed + progress.failed == record.total, "a line has not ended"
        if faults := self._damage(batch):
            return self._fail(batch, faults)
        self._publish_all(batch)
        return self._put(batch, record.end(int(self.now())))

    def _damage(self, batch: Batch) -> tuple[Fault, ...]:
        """Returns the damage of the result files; none if they can be appended to."""
        return tuple(fault for each in self._results(batch) if (fault := each.find_fault()) is not None)

    def _results(self, batch: Batch) -> tuple[ResultFile, ResultFile]:
        record, progress = batch.record, batch.progress
        output, errors = self.path(record.output_id), self.path(record.error_id)
        return (
            ResultFile("output", record.output_id, output, progress.output_bytes),
            ResultFile("error", record.error_id, errors, progress.error_bytes),
        )

    def _fail(self, batch: Batch, faults: tuple[Fault, ...]) -> Batch:
        """Ends a batch as failed; what is left of its results can be read."""
        left = Batch(batch.record, clip_progress(self._results(batch), batch.progress))
        self._publish_all(left)
        self.database.put_progress(left.record.id, left.progress)
        return self._put(left, left.record.refuse(faults, int(self.now())))

    def _publish_all(self, batch: Batch) -> None:
        """Turns the written results into files."""
        record, progress = batch.record, batch.progress
        self._work.pop(record.id, None)
        if record.in_progress_at is not None:
            self._publish(record, record.output_id, progress.output_bytes)
            self._publish(record, record.error_id, progress.error_bytes)

    def _publish(self, record: BatchRecord, file_id: str, size: int) -> None:
        if not size:
            self._unlinked.append(self.path(file_id))
            return
        self._disk.append(self.path(file_id), size, b"")
        now, lasts = int(self.now()), record.output_expires_after
        kind = "output" if file_id == record.output_id else "error"
        self.database.add_file(
            FileRecord(
                id=file_id,
                filename=f"{record.id}_{kind}.jsonl",
                purpose=OUTPUT_PURPOSE,
                bytes=size,
                created_at=now,
                expires_at=None if lasts is None else now + lasts,
                owner=record.owner,
            )
        )

    def _put(self, batch: Batch, record: BatchRecord) -> Batch:
        self.database.put_record(record)
        return Batch(record, batch.progress)

    def _load(self, batch_id: str) -> Work:
        work = self._work.get(batch_id)
        if work is None:
            progress = self.batch(batch_id).progress
            work = self._work[batch_id] = Work(progress, LineRanges.decode(progress.spans))
        return work
