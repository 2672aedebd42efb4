"""Standard error is a pipe that nobody reads: nothing waits for it, in no process."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.processes.serving import Serving, serving

SIMULATED = ("model.device=simulated", "log.requests=true")
NUM_REQUESTS = 100  # whose lines are more than the pipe and its page of slack hold


@contextmanager
def unread(folder: Path, *overrides: str) -> Iterator[tuple[Serving, int]]:
    """A server whose log fills a small pipe, and the end that nobody reads."""
    fifo = folder / "stderr"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4096)
    try:
        with serving(folder, *SIMULATED, *overrides) as server:
            yield server, reader
    finally:
        os.close(reader)


def test_requests_are_answered_and_a_signal_drains(tmp_path: Path) -> None:
    with unread(tmp_path) as (server, _):
        for _ in range(NUM_REQUESTS):
            assert server.post("/v1/completions", prompt="x", max_tokens=2)[0] == 200
        assert server.get("/health")[0] == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0


def test_a_hang_is_seen(tmp_path: Path) -> None:
    with unread(tmp_path, "server.hang_timeout=1") as (server, _):
        for _ in range(NUM_REQUESTS):
            server.get("/ping")
        os.kill(server.children["scheduler-0"], signal.SIGSTOP)
        assert server.wait() == 1


def test_a_reader_that_is_back_is_told_what_it_missed(tmp_path: Path) -> None:
    """Every line that is not lost is whole."""
    with unread(tmp_path, "log.format=json") as (server, reader):
        for _ in range(NUM_REQUESTS):
            server.get("/ping")
        os.set_blocking(reader, True)
        got = b""
        while got.count(b'"GET /ping') < NUM_REQUESTS:
            got += os.read(reader, 1 << 16)
        assert all(line.startswith(b"{") and line.endswith(b"}") for line in got.splitlines()[:NUM_REQUESTS])
