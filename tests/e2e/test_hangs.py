"""Processes that live and answer nothing: they are noticed, told of, killed and, among replicas, replaced."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.processes.serving import Serving, serving, wait_until_gone

SIMULATED = ("model.device=simulated", "simulated.step_ms=5", "server.hang_timeout=1")
BODY = {"model": "demo", "max_tokens": 200, "ignore_eos": True}


@pytest.fixture(autouse=True)
def socket_folders(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where servers make their socket folders: with a path short enough, and nobody else's."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def wait_until_held(server: Serving, number: int) -> None:
    deadline = time.monotonic() + 10
    while server.metric("requests_held") < number:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_for_health(server: Serving, status: int, text: str = "") -> str:
    deadline = time.monotonic() + 15
    while True:
        got, answer = server.get("/health")
        if got == status and text in answer:
            return answer
        assert time.monotonic() < deadline, answer
        time.sleep(0.02)


def test_replicas_that_hang_come_back(tmp_path: Path) -> None:
    """A rank of one and the scheduler of the other, one after the other; whole answers lose nothing."""
    with serving(tmp_path, "parallel.dp=2", *SIMULATED) as server, ThreadPoolExecutor(8) as pool:
        for number, victim in enumerate(("rank-0-0", "scheduler-1"), 1):
            answers = [pool.submit(server.post, "/v1/completions", prompt=f"{i} x", **BODY) for i in range(8)]
            wait_until_held(server, 8)
            os.kill(server.children[victim], signal.SIGSTOP)
            wait_for_health(server, 503, f"no answer from {victim}")
            wait_for_health(server, 503, f"{victim} has not answered for 1 s")
            assert [answer.result(timeout=20)[0] for answer in answers] == [200] * 8
            wait_for_health(server, 200)
            assert server.said().count(" is restarted in ") == number
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        wait_until_gone(server.pids, 0)


def test_a_server_that_hangs_ends_everything(tmp_path: Path) -> None:
    """So does any process of a single replica."""
    with serving(tmp_path, *SIMULATED) as server, ThreadPoolExecutor(8) as pool:
        answer = pool.submit(server.post, "/v1/completions", prompt="x", **{**BODY, "max_tokens": 1500})
        wait_until_held(server, 1)
        os.kill(server.children["server"], signal.SIGSTOP)
        assert server.wait() == 1
        wait_until_gone(server.pids, 0)
        assert "toka-async: server has not answered for 1 s\n" in server.said()
        assert isinstance(answer.exception(timeout=5), OSError)
