"""A lock for each GPU, so that no two engines use one by accident: flock(2) on a file that the GPU's UUID names.

The process that computes on a GPU holds its lock. The system releases it when the process has ended, however it ended,
so a new life of an engine waits for the old one. The files stay; they contain the holder's pid, for messages only.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

WAIT = 60.0  # seconds that an old life may take to end
INTERVAL = 0.1  # seconds
SIBLING_INTERVAL = 0.02
SHARED = Path("/run/lock")  # unlike /tmp it is never cleaned, and is the same for services with a /tmp of their own
FOR_ALL = 0o1777  # a folder's mode: everybody may make files, and remove their own

logger = logging.getLogger(__name__)


class GpuLockError(Exception):
    """A GPU cannot be locked; the message is all that the user needs."""


def take_gpu(
    gpu: str,
    folder: str,
    after: str | None = None,
    wait: float = WAIT,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Lock a GPU until the end of this process, or until the returned descriptor is closed.

    Args:
        gpu: its UUID.
        folder: `auto` or a path, as in `parallel.gpu_locks`.
        after: the UUID of a GPU that another child of this process's parent locks first, which is waited for. Engines
            that lock all of their GPUs in the same order never wait for each other in a circle.
        wait: seconds for another holder to end.

    Raises GpuLockError if another process still holds the lock, or if its file cannot be used.
    """
    place = choose_folder() if folder == "auto" else Path(folder)
    if after is not None:
        _wait_sibling(place / f"toka-async-{after}.lock", sleep)
    path = place / f"toka-async-{gpu}.lock"
    fd = _open(path)
    deadline, has_spoken = clock() + wait, False
    while not _try_lock(fd):
        if clock() >= deadline:
            raise GpuLockError(
                f"GPU {gpu}: {_describe_holder(fd)} uses it ({path}); end that process, choose another GPU with "
                "CUDA_VISIBLE_DEVICES, or set parallel.gpu_locks to nothing if engines shall share GPUs"
            )
        if not has_spoken:
            logger.info("GPU %s: %s uses it; waiting up to %g s for its end", gpu, _describe_holder(fd), wait)
            has_spoken = True
        sleep(INTERVAL)
    os.truncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _wait_sibling(path: Path, sleep: Callable[[float], None]) -> None:
    """Wait until a child of this process's parent has a lock. If it cannot have it, the parent ends this process."""
    fd = _open(path)
    while _find_parent(_read_holder(fd)) != os.getppid():
        sleep(SIBLING_INTERVAL)
    os.close(fd)


def _find_parent(pid: str) -> int | None:
    """Find the parent of a process; None: there is no such process."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return None


def choose_folder() -> Path:
    """Choose a folder in which all users of the machine may make files, the same one for all of them."""
    with suppress(OSError):
        is_read_only = os.statvfs(SHARED).f_flag & os.ST_RDONLY  # as containers may have it
        if stat.S_IMODE(SHARED.stat().st_mode) == FOR_ALL and not is_read_only:
            return SHARED
    return Path("/tmp")


def _open(path: Path) -> int:
    """Open the file of a lock, or make it for all users. Follows no link and waits for nobody."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        try:
            fd = os.open(path, flags)  # without O_CREAT, which Linux refuses for other users' files in such folders
        except FileNotFoundError:
            fd = _make(path, flags)
    except OSError as error:
        raise GpuLockError(
            f"parallel.gpu_locks: cannot open {path}: {error.strerror}; name another folder, or nothing for no locks"
        ) from None
    state = os.fstat(fd)
    if not stat.S_ISREG(state.st_mode) or state.st_nlink != 1:  # it would be written to
        os.close(fd)
        raise GpuLockError(f"parallel.gpu_locks: {path} is not a lock; remove it")
    return fd


def _make(path: Path, flags: int) -> int:
    try:
        fd = os.open(path, flags | os.O_CREAT | os.O_EXCL)
    except FileExistsError:  # made by another process meanwhile
        return os.open(path, flags)
    os.fchmod(fd, 0o666)  # whatever the umask is
    return fd


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _describe_holder(fd: int) -> str:
    pid = _read_holder(fd)
    return f"process {pid}" if pid else "another process"


def _read_holder(fd: int) -> str:
    """Read the pid of the last holder; empty: it is not known."""
    text = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
    return text if text.isdecimal() else ""
