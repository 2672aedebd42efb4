"""A replica's engine: `toka-async serve` as a child of the process that answers for it. Knows no Ray.

The child's standard input is its lifeline, and it stays in this process's group: all of its processes end with this
one, however that ends.
"""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

KEPT_LINES = 3  # of the log, for the error when it does not start
HEALTH_TIMEOUT = 10.0  # seconds
MOST_UNANSWERED = 3  # questions in a row
# Ray sets these in its workers. The first makes work on CPUs slow, the others disturb CUDA graphs and NCCL's watchdog.
FOREIGN = ("OMP_NUM_THREADS", "NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ASYNC_ERROR_HANDLING")


class ReplicaStartError(Exception):
    """An engine did not start; the message has the last lines of its log."""


class ReplicaEngine:
    """A running engine. Its log goes to this process's standard error.

    Args:
        overrides: its configuration, as `section.key=value`.
        gpus: ids for CUDA_VISIBLE_DEVICES; empty: as in this process's environment.

    Attributes:
        address, url: of direct submission and of HTTP, once `wait_serving` has returned.
    """

    def __init__(self, overrides: Sequence[str], gpus: Sequence[str] = ()) -> None:
        self.address = self.url = ""
        self._num_unanswered = 0
        self._last: deque[str] = deque(maxlen=KEPT_LINES)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "toka_async.cli", "serve", "--lifeline", *overrides],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=clean_environment(os.environ, gpus),
        )
        self._log = threading.Thread(target=self._pass_log_on, name="engine log", daemon=True)
        self._log.start()

    def wait_serving(self) -> None:
        """Wait until requests are taken. Raises ReplicaStartError."""
        assert self.process.stdout is not None
        self.url, self.address = (self.process.stdout.readline().rpartition(" ")[2].strip() for _ in range(2))
        if not self.address:
            code = self.process.wait()
            self._close()
            raise ReplicaStartError(f"the engine did not start (exit code {code}): {' | '.join(self._last)}")

    def find_problem(self) -> str | None:
        """Find why the engine is lost, if it is: it has ended, or has answered no question about its health lately.

        An engine that answers 503 is not lost: it drains, or ends or restarts by itself what has failed.
        """
        if (code := self.process.poll()) is not None:
            return f"the engine ended with exit code {code}"
        parts = urlsplit(self.url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=HEALTH_TIMEOUT)
        try:
            connection.request("GET", "/health")
            connection.getresponse()
            self._num_unanswered = 0
        except (OSError, http.client.HTTPException):
            self._num_unanswered += 1
        finally:
            connection.close()
        if self._num_unanswered >= MOST_UNANSWERED:
            return f"the engine has not answered {self._num_unanswered} times in a row"
        return None

    def drain(self) -> int:
        """Let running requests finish, for `server.drain_timeout`; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait()
        self._close()
        return code

    def kill(self) -> None:
        """End all of its processes at once."""
        self.process.kill()
        self.process.wait()
        self._close()

    def _close(self) -> None:
        self._log.join()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()

    def _pass_log_on(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._last.append(line.strip())
            sys.stderr.write(line)
            sys.stderr.flush()


def clean_environment(environment: Mapping[str, str], gpus: Sequence[str]) -> dict[str, str]:
    """Return the environment without what Ray adds for its own workers, and with these GPUs."""
    kept = {name: value for name, value in environment.items() if name not in FOREIGN and not name.startswith("RAY_")}
    return kept | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})
