"""Result files of a batch that somebody else has cut short or removed, found before more is written behind them.

What is left of them may still be of use: whole lines of it. Knows no database.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from toka_async.batches.disk import open_fd, storage_errors
from toka_async.batches.records import BatchProgress, Fault

BLOCK = 1 << 18  # bytes that are read at once


@dataclass(frozen=True, slots=True)
class ResultFile:
    """One of a batch's two. kind: `output` or `error`. written: the bytes that were committed."""

    kind: str
    file_id: str
    path: Path
    written: int

    def fault(self) -> Fault | None:
        """What has become of it, if anything has.

        Raises:
            StorageError: the folder cannot be looked into, which says nothing of the file.
        """
        size = size_of(self.path) if self.written else 0
        if size >= self.written:
            return None
        return Fault(
            code=f"{self.kind}_file_damaged",
            message=f"the {self.kind} file ({self.file_id}) has {size} bytes of {self.written} that were written: "
            "somebody else cut it short or removed it before the batch ended. What is left of the batch's results "
            "can be read; make a new batch of the lines that are not in them",
            param=f"{self.kind}_file_id",
        )

    def num_left(self) -> int:
        """Bytes of its whole lines. Raises StorageError."""
        return whole_lines(self.path, min(size_of(self.path), self.written))


def left_of(files: tuple[ResultFile, ResultFile], progress: BatchProgress) -> BatchProgress:
    """The progress with the lengths that the output and the error file have now. Raises StorageError."""
    output, errors = (each.num_left() if each.fault() else each.written for each in files)
    return msgspec.structs.replace(progress, output_bytes=output, error_bytes=errors)


def salvaged(files: tuple[ResultFile, ResultFile]) -> BatchProgress:
    """What can be told of a batch by its output and error file alone. Raises StorageError."""
    sizes = [whole_lines(each.path, size_of(each.path)) for each in files]
    counts = [num_lines(each.path, size) for each, size in zip(files, sizes, strict=True)]
    return BatchProgress(completed=counts[0], failed=counts[1], output_bytes=sizes[0], error_bytes=sizes[1])


def size_of(path: Path) -> int:
    """0 when it is not there, though its folder is. Raises StorageError."""
    with storage_errors(path):
        try:
            return path.stat().st_size
        except FileNotFoundError:
            path.parent.stat()
            return 0


def whole_lines(path: Path, length: int) -> int:
    """Bytes of the lines that end within the file's first `length` bytes. Raises StorageError."""
    if not length:
        return 0
    with storage_errors(path), open_fd(path, os.O_RDONLY) as fd:
        while length:
            start = max(0, length - BLOCK)
            if end := os.pread(fd, length - start, start).rfind(b"\n") + 1:
                return start + end
            length = start
    return 0


def num_lines(path: Path, length: int) -> int:
    """Of the file's first `length` bytes. Raises StorageError."""
    if not length:
        return 0
    with storage_errors(path), open_fd(path, os.O_RDONLY) as fd:
        return sum(os.pread(fd, min(BLOCK, length - at), at).count(b"\n") for at in range(0, length, BLOCK))
