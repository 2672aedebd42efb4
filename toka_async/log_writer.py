"""Writes lines to a descriptor in a thread, so that no caller waits for the reader.

A reader that takes nothing (a stuck log collector, a terminal that is held) fills the bounded backlog. Later lines are
dropped and counted, and the count is written when the reader is back. Knows no log records.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable

MOST_BYTES = 1 << 20  # of waiting lines; more are dropped


class LogWriter:
    """Writes to one descriptor. The thread starts with the first line.

    Args:
        fd: the descriptor, which is never closed.
        lost: makes the line about dropped lines from their number; None: there is no such line.
    """

    def __init__(self, fd: int, lost: Callable[[int], str] | None = None) -> None:
        self._fd = fd
        self._lost = lost
        self._changed = threading.Condition()
        self._lines: deque[bytes] = deque()
        self._num_bytes = 0  # of waiting lines and those being written
        self._num_lost = 0
        self._is_stuck = False
        self._thread: threading.Thread | None = None

    def put(self, line: str) -> None:
        """Queue the line. Returns at once."""
        data = line.encode("utf-8", "backslashreplace") + b"\n"
        with self._changed:
            if self._num_bytes + len(data) > MOST_BYTES:
                self._num_lost += 1
                return
            self._append(data)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="log", daemon=True)
                self._thread.start()

    def flush(self, seconds: float) -> bool:
        """Wait until every line is written, at most `seconds`; not at all while the reader is known to be stuck."""
        with self._changed:
            if not self._is_stuck:
                self._is_stuck = not self._changed.wait_for(lambda: not self._num_bytes, seconds)
            return not self._is_stuck

    def _append(self, data: bytes) -> None:
        self._lines.append(data)
        self._num_bytes += len(data)
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
                lines = self._take()
            size = sum(map(len, lines))
            is_written = self._write(b"".join(lines))
            with self._changed:
                if not is_written:
                    self._num_lost += len(lines)
                elif self._num_lost and not self._lines and self._lost is not None:
                    count, self._num_lost = self._num_lost, 0
                    self._append(self._lost(count).encode() + b"\n")
                self._num_bytes -= size
                if not self._num_bytes:
                    self._is_stuck = False
                    self._changed.notify_all()

    def _take(self) -> list[bytes]:
        """Take lines for one write; if it is short, a pipe with several writers keeps it together."""
        lines = [self._lines.popleft()]
        left = select.PIPE_BUF - len(lines[0])
        while self._lines and len(self._lines[0]) <= left:
            left -= len(self._lines[0])
            lines.append(self._lines.popleft())
        return lines

    def _write(self, data: bytes) -> bool:
        """False if nobody can read it."""
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:  # another process made the descriptor non-blocking
                poll = select.poll()
                poll.register(self._fd, select.POLLOUT)
                poll.poll()
            except OSError:
                return False
        return True
