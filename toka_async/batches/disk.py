"""Changes files so that a crash at any moment leaves the state before or after. Knows no database."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class StorageError(Exception):
    """The disk cannot store something, or what it stored is broken. full: there is no room."""

    def __init__(self, message: str, *, full: bool = False) -> None:
        super().__init__(message)
        self.full = full


class Disk:
    """The file system.

    before: called with the name of each step before it changes something; a test can end there.
    """

    def __init__(self, before: Callable[[str], None] = lambda _step: None) -> None:
        self.before = before

    def append(self, path: Path, length: int, data: bytes) -> None:
        """Writes `data` after the file's first `length` bytes, cuts off the rest, and waits until it is safe.

        Raises StorageError without room, or for a file shorter than `length`.
        """
        with storage_errors(path), open_fd(path, os.O_WRONLY | os.O_CREAT) as fd:
            size = os.fstat(fd).st_size
            if size < length:
                raise StorageError(f"{path} has {size} bytes, {length} were written: somebody else has changed it")
            if size > length:
                self.before("cut")
                os.ftruncate(fd, length)
            self.before("write")
            self.write(fd, data, length)
            self.before("sync")
            os.fdatasync(fd)

    def write(self, fd: int, data: bytes | bytearray, offset: int) -> None:
        view = memoryview(data)
        while view:
            num_written = os.pwrite(fd, view, offset)
            view, offset = view[num_written:], offset + num_written

    def create(self, path: Path) -> None:
        """Makes an empty file, and waits until its name is safe too."""
        with storage_errors(path):
            self.before("create")
            path.touch()
            self.sync_folder(path.parent)

    def sync(self, path: Path) -> None:
        with storage_errors(path), open_fd(path, os.O_RDONLY) as fd:
            self.before("sync")
            os.fsync(fd)

    def rename(self, source: Path, target: Path) -> None:
        with storage_errors(target):
            self.before("rename")
            source.rename(target)
            self.sync_folder(target.parent)

    def remove(self, path: Path) -> None:
        with storage_errors(path), suppress(FileNotFoundError):
            self.before("remove")
            path.unlink()

    def sync_folder(self, folder: Path) -> None:
        with open_fd(folder, os.O_RDONLY | os.O_DIRECTORY) as fd:
            os.fsync(fd)


@contextmanager
def open_fd(path: Path, flags: int) -> Iterator[int]:
    """Opens without waiting for the other end, should a pipe be there instead of a file."""
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror or error}", full=error.errno in FULL) from error
