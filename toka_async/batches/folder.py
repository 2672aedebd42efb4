"""The folder of a store: its names, which tell the store's files from anything else there. Knows no records."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from toka_async.batches.disk import StorageError, storage_errors

FILE_NAME, UPLOAD_NAME = re.compile(r"file-[0-9a-f]{24}"), re.compile(r"[0-9a-f]{32}")
DATABASE, LOCK = "batches.sqlite", "lock"
UNUSED = {LOCK, "lost+found"}  # names allowed in a folder that becomes a store


@dataclass(frozen=True, slots=True)
class StoreFolder:
    path: Path

    @property
    def database(self) -> Path:
        return self.path / DATABASE

    @property
    def reserve(self) -> Path:
        return self.path / "reserve"

    @property
    def files(self) -> Path:
        return self.path / "files"

    @property
    def uploads(self) -> Path:
        return self.path / "uploads"

    def make_upload(self) -> Path:
        return self.uploads / secrets.token_hex(16)

    def claim(self) -> int:
        """Makes the folder if it is missing; returns the descriptor of its lock, which is held until closed.

        Raises StorageError when the folder cannot be used, has foreign files, or another process uses it.
        """
        with storage_errors(self.path):
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check()
            return lock(self.path / LOCK)

    def _check(self) -> None:
        """Raises StorageError for a folder with foreign files."""
        names = {each.name for each in self.path.iterdir()}
        if DATABASE not in names and not names <= UNUSED:
            raise StorageError(
                f"{self.path} is not empty, and no {DATABASE} in it shows that it is of this program: "
                "name an empty or a new folder"
            )
        for each in (self.files, self.uploads):
            if each.is_symlink():
                raise StorageError(f"{each} is a symbolic link: make it a folder, and {self.path} the link, if any")

    def make_folders(self) -> None:
        """Makes the inner folders once the database shows that the folder is ours. Raises StorageError."""
        for each in (self.files, self.uploads):
            with storage_errors(each):
                each.mkdir(mode=0o700, exist_ok=True)

    def list_leftovers(self, known: set[str] | None) -> list[Path]:
        """Returns uploads, and files that are not known (unless None). Raises StorageError."""
        uploads = list_named(self.uploads, UPLOAD_NAME)
        return (
            uploads
            if known is None
            else uploads + [each for each in list_named(self.files, FILE_NAME) if each.name not in known]
        )

    def discard(self) -> None:
        """Removes a closed store without useful contents; foreign files in its folder stay."""
        for path in (self.database, Path(f"{self.database}-wal"), Path(f"{self.database}-shm"), self.reserve):
            path.unlink(missing_ok=True)
        with suppress(OSError):
            self.files.rmdir()
            self.uploads.rmdir()
            (self.path / LOCK).unlink(missing_ok=True)
            self.path.rmdir()


def list_named(folder: Path, form: re.Pattern[str]) -> list[Path]:
    """Returns the files with names of that form; others are foreign. Raises StorageError."""
    with storage_errors(folder), os.scandir(folder) as entries:
        return [Path(each) for each in entries if form.fullmatch(each.name) and each.is_file(follow_symlinks=False)]


def is_name(text: str) -> bool:
    """Tells whether a text names something within a folder; a manipulated database must not lead outside."""
    return "/" not in text and text not in ("", ".", "..")


def lock(path: Path) -> int:
    """Raises StorageError when another process holds the lock. A process that dies releases it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(path, flags, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise StorageError(f"{path} is no file: remove it")
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise StorageError(f"{path.parent} is in use by another process") from None
    except BaseException:
        os.close(fd)
        raise
    return fd
