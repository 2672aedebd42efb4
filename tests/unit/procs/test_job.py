"""What a run finds of one before; whole runs are in tests/e2e."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from toka_async.batches.disk import StorageError
from toka_async.batches.records import Batch, BatchProgress, DoneLine, Fault
from toka_async.batches.store import Store
from toka_async.procs.child import BatchJob
from toka_async.procs.job import INPUT, describe_fault, make_record, open_job


def begun(tmp_path: Path) -> BatchJob:
    """A job of which one line is done."""
    (tmp_path / "in").write_bytes(b'{"custom_id": "a"}\n{"custom_id": "b"}\n')
    job = BatchJob(
        input=str(tmp_path / "in"),
        output=str(tmp_path / "out"),
        errors=str(tmp_path / "err"),
        folder=str(tmp_path / "out.progress"),
    )
    opened = open_job(job)
    assert opened.begun is None
    store, record = opened.store, opened.record
    assert record.input_file_id == INPUT
    store.add_batch(record)
    store.accept(record.id, 2, [])
    store.finish_lines(record.id, [DoneLine(line=0, end=19, failed=False, data=b'{"answer": 1}\n')])
    store.close()
    return job


def test_it_goes_on(tmp_path: Path) -> None:
    job = begun(tmp_path)
    with Path(job.output).open("ab") as file:
        file.write(b"not committed")
    opened = open_job(job)
    opened.store.close()
    assert opened.begun is not None
    assert opened.begun.progress.completed == 1


def test_what_no_run_has_written_is_not_written_over(tmp_path: Path) -> None:
    """Though there is a folder of a run, which has not begun."""
    job = begun(tmp_path)
    with closing(open_job(job).store) as store:
        store.database.remove_batch(open_id(store))
    with pytest.raises(StorageError, match="out exists already, and no run has begun it"):
        open_job(job)


def open_id(store: Store) -> str:
    return store.batches(None, 1)[0].record.id


@pytest.mark.parametrize("left", [None, b"", b'{"answer": 1}'])
def test_an_output_that_has_lost_something_is_told_and_not_waited_for(tmp_path: Path, left: bytes | None) -> None:
    job = begun(tmp_path)
    Path(job.output).unlink()
    if left is not None:
        Path(job.output).write_bytes(left)
    for _ in range(2):  # the folder is let go of
        with pytest.raises(StorageError, match=f"out has {len(left or b'')} bytes, but 14 were written"):
            open_job(job)
    assert Path(job.output).exists() == (left is not None)


def failed(num_lines: int, *faults: Fault) -> Batch:
    return Batch(make_record({}).refuse(faults, 1), BatchProgress(completed=num_lines))


def test_it_says_which_file_is_wrong() -> None:
    job = BatchJob(input="in", output="out", errors="err", folder="folder")
    wrong = failed(0, Fault(code="c", message="wrong", line=3), Fault(code="c", message="wrong too"))
    assert describe_fault(job, wrong) == "in, line 3: wrong (and 1 more fault)"
    damaged = failed(5, Fault(code="error_file_damaged", message="cut; ask again", param="error_file_id"))
    assert describe_fault(job, damaged) == "err: cut; ask again; remove out, err and folder to start over"
