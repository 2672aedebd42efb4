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

    def find_fault(self) -> Fault | None:
        """Returns what has become of a file that was cut short or removed; None for a whole file.

        Raises:
            StorageError: the folder cannot be read, which says nothing of the file.
        """
        size = read_size(self.path) if self.written else 0
        if size >= self.written:
            return None
        return Fault(
            code=f"{self.kind}_file_damaged",
            message=f"the {self.kind} file ({self.file_id}) has {size} bytes of {self.written} that were written: "
            "somebody else cut it short or removed it before the batch ended. What is left of the batch's results "
            "can be read; make a new batch of the lines that are not in them",
            param=f"{self.kind}_file_id",
        )


def clip_progress(files: tuple[ResultFile, ResultFile], progress: BatchProgress) -> BatchProgress:
    """Returns the progress with the whole lines that damaged files still have. Raises StorageError."""
    output, errors = (count_whole_lines(each.path)[0] if each.find_fault() else each.written for each in files)
    return msgspec.structs.replace(progress, output_bytes=output, error_bytes=errors)


def salvage(files: tuple[ResultFile, ResultFile]) -> BatchProgress:
    """Returns what the output and error file alone tell of a batch. Raises StorageError."""
    (output, completed), (errors, failed) = (count_whole_lines(each.path) for each in files)
    return BatchProgress(completed=completed, failed=failed, output_bytes=output, error_bytes=errors)


def read_size(path: Path) -> int:
    """Returns 0 for a file that is not there, though its folder is. Raises StorageError."""
    with storage_errors(path):
        try:
            return path.stat().st_size
        except FileNotFoundError:
            path.parent.stat()
            return 0


def count_whole_lines(path: Path) -> tuple[int, int]:
    """Returns the bytes and the number of a file's whole lines; none if it is not there. Raises StorageError."""
    num_bytes = num_lines = at = 0
    if read_size(path):
        with storage_errors(path), open_fd(path, os.O_RDONLY) as fd:
            while block := os.pread(fd, BLOCK, at):
                if end := block.rfind(b"\n") + 1:
                    num_bytes = at + end
                num_lines += block.count(b"\n")
                at += len(block)
    return num_bytes, num_lines
