"""Reserves room on the disk for operations that make room: on a full disk even forgetting a file needs some.

Knows one file, whose content means nothing.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from toka_async.batches.disk import open_fd

SIZE = 1 << 18  # bytes: enough for some transactions of the database


class Reserve:
    """A file whose room can be given up; it is restored as soon, and as far, as the disk allows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_whole = False
        self.refill()

    def give(self) -> None:
        """Frees the room for others until the next `refill`."""
        self._is_whole = False
        with suppress(OSError), open_fd(self._path, os.O_WRONLY) as fd:
            os.ftruncate(fd, 0)

    def refill(self) -> None:
        """Takes back as much room as there is."""
        if self._is_whole:
            return
        with suppress(OSError), open_fd(self._path, os.O_WRONLY | os.O_CREAT) as fd:
            size = os.fstat(fd).st_size
            while size < SIZE:
                size += os.pwrite(fd, os.urandom(min(4096, SIZE - size)), size)  # zeros might take no room
            self._is_whole = True
