"""The private folder in which the processes of one start have their sockets.

A start removes the folders of earlier starts whose processes were all killed, and nothing else: such a folder is this
user's, has a marker file that no process locks, and contains only what these processes make. Everything is removed by
its name; no link is followed, and nothing is waited for.
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

PREFIX, MARKER = "toka-", "toka-sockets.lock"  # the parent process locks the marker
MEETING = re.compile(r"group-\d+-\d+")  # files through which the ranks of a replica's life find each other
LONGEST_BASE = 44  # characters; a unix socket's address may have about 100 in all


@contextmanager
def socket_folder() -> Iterator[Path]:
    """Make a folder with a short name, and remove it at the end."""
    base = tempfile.gettempdir()
    place = Path(base if len(base) < LONGEST_BASE else "/tmp")
    for left in place.glob(f"{PREFIX}*"):
        remove_unlocked(left)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
    with (folder / "new").open("x") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        (folder / "new").rename(folder / MARKER)  # others never see it unlocked
        try:
            yield folder
        finally:
            remove_folder(folder)


def remove_unlocked(folder: Path) -> None:
    """Remove the folder of an earlier start, unless one of its processes lives or the folder is something else."""
    with suppress(OSError), _open(folder, os.O_DIRECTORY) as fd, _open(MARKER, 0, fd) as marker:
        if _is_ours(os.fstat(marker)):
            fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(folder, fd)


def remove_folder(folder: Path) -> None:
    """Remove the folder of this start; a folder with other contents stays as it is."""
    with suppress(OSError), _open(folder, os.O_DIRECTORY) as fd:
        _remove(folder, fd)


def _remove(folder: Path, fd: int) -> None:
    """Raises OSError if something is added meanwhile."""
    states = {}
    for name in os.listdir(fd):
        with suppress(FileNotFoundError):  # a process that ends removes its sockets
            states[name] = os.stat(name, dir_fd=fd, follow_symlinks=False)
    if MARKER not in states or not all(_is_made_by_us(name, state) for name, state in states.items()):
        return
    for name in sorted(states, key=MARKER.__eq__):  # the marker goes last
        with suppress(FileNotFoundError):  # another process of this start may remove it too
            os.unlink(name, dir_fd=fd)
    folder.rmdir()


def _is_made_by_us(name: str, state: os.stat_result) -> bool:
    if stat.S_ISSOCK(state.st_mode):
        return state.st_uid == os.getuid()
    return _is_ours(state) and (name == MARKER or MEETING.fullmatch(name) is not None)


def _is_ours(state: os.stat_result) -> bool:
    """Whether it is a regular file of this user."""
    return stat.S_ISREG(state.st_mode) and state.st_uid == os.getuid()


@contextmanager
def _open(path: Path | str, flags: int, folder: int | None = None) -> Iterator[int]:
    """Open without following a link, and without waiting for the other end of a pipe."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | flags, dir_fd=folder)
    try:
        yield fd
    finally:
        os.close(fd)
