"""Reopens a batch so that its failed lines run again. Knows no engine."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator
from pathlib import Path

import msgspec

from toka_async.batches.disk import StorageError, storage_errors
from toka_async.batches.line_ranges import LineRanges
from toka_async.batches.lines import read_lines
from toka_async.batches.records import Batch
from toka_async.batches.store import Store

READ_LINES, READ_BYTES = 4096, 1 << 20  # limits of one read


class ResultId(msgspec.Struct, frozen=True):
    id: str


_RESULT_ID = msgspec.json.Decoder(ResultId)


def retry_failed(store: Store, batch: Batch) -> None:
    """Marks the failed lines as not done and empties the error file, in one transaction.

    Nobody else may work on the batch. Raises StorageError when a file cannot be read or has changed.
    """
    record, progress = batch.record, batch.progress
    if not progress.failed:
        return
    errors = store.path(record.error_id)
    failed = set(list_failed_lines(errors, progress.error_bytes))
    spans = list_done(store.path(record.input_file_id), LineRanges.decode(progress.spans), failed)
    if len(failed) != progress.failed or spans.num_done != progress.completed:
        raise StorageError(f"{errors} is not what was written")
    again = msgspec.structs.replace(progress, failed=0, error_bytes=0, spans=spans.encode())
    with store.database.transaction():
        store.database.remove_file(record.error_id)
        store.database.put_progress(record.id, again)
        store.database.put_record(record.reopen())
    with storage_errors(errors):
        os.truncate(errors, 0)


def list_failed_lines(path: Path, length: int) -> Iterator[int]:
    """Yields the numbers of the lines that the file's first `length` bytes answer. Raises StorageError."""
    with storage_errors(path), path.open("rb") as file:
        while file.tell() < length:
            try:
                yield int(_RESULT_ID.decode(file.readline()).id.rpartition("_")[2])
            except (msgspec.MsgspecError, UnicodeDecodeError, ValueError):
                raise StorageError(f"{path} is not what was written") from None


def list_done(path: Path, before: LineRanges, undone: Container[int]) -> LineRanges:
    """Returns the done lines of an input file without the `undone` ones. Raises StorageError."""
    spans, number, offset = LineRanges(), 0, 0
    for start, stop in zip(before.starts, before.stops, strict=True):
        while number < stop:
            lines = read_lines(path, offset, min(READ_LINES, stop - number), READ_BYTES)
            if not lines:
                raise StorageError(f"{path} has lost lines")
            for line in lines:
                if number >= start and number not in undone:
                    spans.add(number, line.end)
                number, offset = number + 1, line.end
    return spans
