"""Starts `toka-async serve` for this process alone, and a client of it; tells when it ends.

The engine listens on a socket in a folder that only this user can enter. Its standard input is its lifeline: it ends
when this process ends, however that happens. Knows no requests.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import toka_async
from toka_async.client import ConnectionLostError, SyncClient
from toka_async.socket_folder import socket_folder

STOP_TIMEOUT = 10.0  # seconds for an orderly end
ROOT = Path(toka_async.__file__).parents[1]
ADDRESSES = ("toka-async: serving ", "toka-async: direct submission at ")  # lines that a server prints once it is ready
KEPT_LINES = 20  # of the engine's log, for the error when it ends


class EngineDeadError(RuntimeError):
    """The engine did not start, or has ended; the message has the last lines of its log."""


class EngineProcess:
    """A running engine. Its log goes to this process's standard error.

    Args:
        overrides: its configuration, as `section.key=value`.

    Attributes:
        client: of direct submission. Once the engine has ended, it is closed.
        end: why there is no engine any more; None while there is one.

    Raises:
        EngineDeadError: it did not start.
    """

    def __init__(self, overrides: Sequence[str]) -> None:
        self.end: EngineDeadError | None = None
        self._ending = threading.Lock()  # is held by who closes the client, and never released
        self._ready = threading.Event()  # is set by the end, too
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._folder = ExitStack()
        self._url = f"ipc://{self._folder.enter_context(socket_folder())}/direct"
        self.client = SyncClient(self._url)
        own = ["server.host=127.0.0.1", "server.port=0", f"zmq.bind={self._url}"]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "toka_async.cli", "serve", "--lifeline", *overrides, *own],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,  # libraries may print to either, as much as they like
            text=True,
            errors="replace",
            env=make_environment(),
            process_group=0,  # an interrupt by a terminal or a notebook is meant for this process
        )
        forget_in_forks(self._process)
        self._thread = threading.Thread(target=self._watch, name="toka-engine", daemon=True)
        self._thread.start()
        try:
            self._ready.wait()
            if self.end is not None:
                raise self.end
            self.client.__enter__()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the engine, and wait for it. Further calls do nothing."""
        with self._folder:  # which goes also when the user interrupts this
            try:
                self._note_end("the engine was shut down")
            finally:
                self._end_process()

    def _end_process(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _watch(self) -> None:
        """Pass the engine's log on until it ends."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(ADDRESSES):
                if line.rstrip().endswith(self._url):
                    self._ready.set()
                continue
            self._lines.append(line)
            if self.end is None:
                with suppress(Exception):  # the user's stream may be of any kind, closed, or None
                    sys.stderr.write(line)
                    sys.stderr.flush()
        code = self._process.wait()
        what = "has ended" if self._ready.is_set() else "did not start"
        log = "".join(self._lines).rstrip()
        self._note_end(f"the engine {what} (exit code {code}):\n{log}")
        self._ready.set()

    def _note_end(self, reason: str) -> None:
        """Note the first end, and fail what waits for the engine."""
        if self._ending.acquire(blocking=False):
            self.end = EngineDeadError(reason)
            # It was never open, or the interpreter ends and starts no more threads.
            with suppress(ConnectionLostError, RuntimeError):
                self.client.__exit__(None, None, None)


def forget_in_forks(process: subprocess.Popen[str]) -> None:
    """Close the lifeline in processes that `os.fork` makes of this one: the engine shall end with this one."""
    kept = weakref.ref(process)

    def close_lifeline() -> None:
        forked = kept()
        if forked is not None and forked.stdin is not None:
            forked.stdin.close()

    os.register_at_fork(after_in_child=close_lifeline)


def make_environment() -> dict[str, str]:
    """Make the environment of the engine: it imports what is installed and this package, and nothing of the working
    directory, which may be a checkpoint's.
    """
    paths = [os.environ.get("PYTHONPATH", ""), "" if "site-packages" in ROOT.parts else str(ROOT)]
    return {
        **os.environ,
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TOKA_API_KEYS": secrets.token_urlsafe(32),  # that nobody knows, since its HTTP port is for nobody
        "TOKA_ADMIN_KEYS": "",
    }
