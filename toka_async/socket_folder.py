"""The private folder in which the processes of one start have their sockets.

A start removes the folders of earlier ones whose processes were all killed. It removes nothing else: a folder counts
as such a one only when it is this user's, has a marker file that nobody holds locked, and has nothing in it but what
these processes make. Everything is removed by its name, and nothing is followed or waited for.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX, MARKER = "toka-", "toka-sockets.lock"  # the marker is locked as long as the parent process lives
MEETING = re.compile(r"group-\d+-\d+")  # files in which the ranks of a replica, in one of its lives, find each other
LONGEST_BASE = 44  # characters; with all names in it, an address of a unix socket ends at about 100


@contextmanager
def socket_folder() -> Iterator[Path]:
    """A new folder with a short name, removed at the end."""
    base = tempfile.gettempdir()
    place = Path(base if len(base) < LONGEST_BASE else "/tmp")
    for left in place.glob(f"{PREFIX}*"):
        remove_unlocked(left)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
    with (folder / "new").open("x") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        (folder / "new").rename(folder / MARKER)  # it is locked from the first moment that others see it
        try:
            yield folder
        finally:
            remove_folder(folder)


def remove_unlocked(folder: Path) -> None:
    """Removes the folder of an earlier start, unless a process of that start lives, or it is anything else."""
    with suppress(OSError), _opened(folder, os.O_DIRECTORY) as fd, _opened(MARKER, 0, fd) as marker:
        if _is_ours(os.fstat(marker)):
            fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(folder, fd)


def remove_folder(folder: Path) -> None:
    """Removes the folder of this start; one that has something else in it stays as it is."""
    with suppress(OSError), _opened(folder, os.O_DIRECTORY) as fd:
        _remove(folder, fd)


def _remove(folder: Path, fd: int) -> None:
    """Raises OSError when somebody else changes the folder meanwhile."""
    states = {name: os.stat(name, dir_fd=fd, follow_symlinks=False) for name in os.listdir(fd)}
    if MARKER not in states or not all(_is_made_by_us(name, state) for name, state in states.items()):
        return
    for name in sorted(states, key=MARKER.__eq__):  # the marker is the last
        with suppress(FileNotFoundError):  # another process of this start removes it too
            os.unlink(name, dir_fd=fd)
    folder.rmdir()


def _is_made_by_us(name: str, state: os.stat_result) -> bool:
    if stat.S_ISSOCK(state.st_mode):
        return state.st_uid == os.getuid()
    return _is_ours(state) and (name == MARKER or MEETING.fullmatch(name) is not None)


def _is_ours(state: os.stat_result) -> bool:
    """Whether it is a file, and this user's."""
    return stat.S_ISREG(state.st_mode) and state.st_uid == os.getuid()


@contextmanager
def _opened(path: Path | str, flags: int, folder: int | None = None) -> Iterator[int]:
    """Opened without following a link, and without waiting for the other end of a pipe."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | flags, dir_fd=folder)
    try:
        yield fd
    finally:
        os.close(fd)
