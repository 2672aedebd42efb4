"""The folder that `toka-async batch run` keeps beside its output, and whether a command may continue that run.

Used by the command before it starts anything, and by the process that does the work. Knows no engine.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from toka_async.batches.clock import SettledClock
from toka_async.batches.disk import StorageError
from toka_async.batches.records import FINAL, Batch, BatchProgress, BatchRecord
from toka_async.batches.store import Store
from toka_async.procs.child import BatchJob

INPUT, OUTPUT, ERRORS = "input", "output", "errors"  # ids of the files


@dataclass(frozen=True, slots=True)
class OpenJob:
    """A job whose folder this process holds. begun: the batch, if an earlier command began it."""

    store: Store
    record: BatchRecord
    begun: Batch | None = None

    @property
    def is_finished(self) -> bool:
        return self.begun is not None and self.record.status in FINAL

    @property
    def progress(self) -> BatchProgress:
        return BatchProgress() if self.begun is None else self.begun.progress


def open_job(job: BatchJob) -> OpenJob:
    """Open the store of the job. Raises StorageError if the folder or the files do not fit the run."""
    store = Store(Path(job.folder), SettledClock(), places=map_files(job))
    try:
        begun = next(iter(store.batches(None, 1)), None)
        if begun is not None and is_void(job, begun):
            store.close()
            store.folder.discard()
            return open_job(job)
        if begun is None:
            check_free(job)
            return OpenJob(store, make_record(collect_facts(job)))
        check_same(job, begun.record.metadata or {})
        check_results(job, begun.progress)
    except BaseException:
        store.close()
        raise
    return OpenJob(store, begun.record, begun)


def is_void(job: BatchJob, begun: Batch) -> bool:
    """Tells whether an ended run left nothing: it answered no line, or all of its answers were removed."""
    if begun.record.status not in FINAL:
        return False
    num_ended = begun.progress.completed + begun.progress.failed
    return not num_ended or not (Path(job.output).exists() or Path(job.errors).exists())


def map_files(job: BatchJob) -> dict[str, Path]:
    return {INPUT: Path(job.input), OUTPUT: Path(job.output), ERRORS: Path(job.errors)}


def collect_facts(job: BatchJob) -> dict[str, str]:
    """Collect what must be unchanged for a run to continue."""
    state = Path(job.input).stat()
    files = {"input": job.input, "errors": job.errors, "size": str(state.st_size), "modified": str(state.st_mtime_ns)}
    return files | job.model


def check_same(job: BatchJob, before: dict[str, str]) -> None:
    """Raise StorageError if the run was begun with other facts. A fact that `before` lacks counts as the same."""
    now = collect_facts(job)
    different = [name for name in now if before.get(name, now[name]) != now[name]]
    if not different:
        return
    anew = f"remove {job.output}, {job.errors} and {job.folder} to start over"
    for name in different:
        if name in job.model:
            raise StorageError(
                f"{job.output} was begun with {name}={before[name]!r}, and now it is {now[name]!r}: "
                f"continue with the former, or {anew}"
            )
    raise StorageError(f"{job.folder} belongs to another run, or {job.input} has changed since: {anew}")


def check_free(job: BatchJob) -> None:
    """Raise StorageError if files exist where a new run would write."""
    for path in (Path(job.output), Path(job.errors)):
        if path.exists() and path.stat().st_size:
            raise StorageError(f"{path} exists already, and no run has begun it: remove it or name another")


def check_results(job: BatchJob, progress: BatchProgress) -> None:
    """Raise StorageError if a result file is shorter than what was written: the run would wait for ever."""
    for path, wanted in ((Path(job.output), progress.output_bytes), (Path(job.errors), progress.error_bytes)):
        size = path.stat().st_size if path.is_file() else 0
        if size < wanted:
            raise StorageError(
                f"{path} has {size} bytes, but {wanted} were written: put it back, "
                f"or remove it and {job.folder} to start over"
            )


def describe_fault(job: BatchJob, batch: Batch) -> str:
    """Describe in a line what is wrong with the files of a failed batch."""
    fault, *others = batch.record.faults
    more = f" (and {len(others)} more fault{'s' * (len(others) > 1)})" if others else ""
    results = {"output_file_id": job.output, "error_file_id": job.errors}
    where = results.get(fault.param or "") or (f"{job.input}, line {fault.line}" if fault.line else job.input)
    is_begun = batch.progress.completed + batch.progress.failed > 0
    anew = f"; remove {job.output}, {job.errors} and {job.folder} to start over" if is_begun else ""
    return f"{where}: {fault.message}{anew}{more}"


def make_record(about: dict[str, str]) -> BatchRecord:
    return BatchRecord(
        id=f"batch_{secrets.token_hex(12)}",
        endpoint="",  # each line has its own
        input_file_id=INPUT,
        output_id=OUTPUT,
        error_id=ERRORS,
        created_at=int(time.time()),
        metadata=about,
    )
