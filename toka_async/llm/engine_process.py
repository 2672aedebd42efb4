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
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from toka_async.client import ConnectionLostError, SyncClient
from toka_async.socket_folder import socket_folder

STOP_TIMEOUT = 10.0  # seconds for an orderly end
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
        self._is_ready = False
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._folder = ExitStack()
        url = f"ipc://{self._folder.enter_context(socket_folder())}/direct"
        self.client = SyncClient(url)
        own = ["server.host=127.0.0.1", "server.port=0", f"zmq.bind={url}"]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "toka_async.cli", "serve", "--lifeline", *overrides, *own],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            # A key that nobody knows, since its HTTP port is for nobody.
            env={**os.environ, "TOKA_API_KEYS": secrets.token_urlsafe(32)},
            process_group=0,  # an interrupt by a terminal or a notebook is meant for this process
        )
        self._thread = threading.Thread(target=self._watch, name="toka-engine", daemon=True)
        self._thread.start()
        try:
            self._wait_ready()
        except BaseException:
            self.stop()
            raise

    def _wait_ready(self) -> None:
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            self._thread.join()
            assert self.end is not None
            raise self.end
        self.client.__enter__()
        self._is_ready = True

    def stop(self) -> None:
        """End the engine, and wait for it. Further calls do nothing."""
        self._note_end("the engine was shut down")
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()
        self._folder.close()

    def _watch(self) -> None:
        """Pass the engine's log on until it ends."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._lines.append(line)
            if self.end is None:
                with suppress(Exception):  # the user's stream may be of any kind, closed, or None
                    sys.stderr.write(line)
                    sys.stderr.flush()
        code = self._process.wait()
        what = "has ended" if self._is_ready else "did not start"
        log = "".join(self._lines).rstrip()
        self._note_end(f"the engine {what} (exit code {code}):\n{log}")

    def _note_end(self, reason: str) -> None:
        """Note the first end, and fail what waits for the engine."""
        if self._ending.acquire(blocking=False):
            self.end = EngineDeadError(reason)
            # It was never open, or the interpreter ends and starts no more threads.
            with suppress(ConnectionLostError, RuntimeError):
                self.client.__exit__(None, None, None)
