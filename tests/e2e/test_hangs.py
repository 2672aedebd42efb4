"""Processes that live and answer nothing: they are noticed, told of, killed and, among replicas, replaced."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.drivers.until import wait_until
from tests.processes.serving import Serving, serving

pytestmark = pytest.mark.usefixtures("socket_folders")
SIMULATED = ("model.device=simulated", "simulated.step_ms=5", "server.hang_timeout=1")
BODY = {"model": "demo", "max_tokens": 200, "ignore_eos": True}


def wait_for_health(server: Serving, status: int, text: str = "") -> None:
    def is_so() -> bool:
        got, answer = server.get("/health")
        return got == status and text in answer

    wait_until(is_so, lambda: server.get("/health"))


def test_replicas_that_hang_come_back(tmp_path: Path) -> None:
    """A rank of one and the scheduler of the other, one after the other; whole answers lose nothing."""
    with serving(tmp_path, "parallel.dp=2", *SIMULATED) as server, ThreadPoolExecutor(8) as pool:
        for number, victim in enumerate(("rank-0-0", "scheduler-1"), 1):
            answers = [pool.submit(server.post, "/v1/completions", prompt=f"{i} x", **BODY) for i in range(8)]
            wait_until(lambda: server.metric("requests_held") == 8)
            os.kill(server.children[victim], signal.SIGSTOP)
            wait_for_health(server, 503, f"no answer from {victim}")
            wait_for_health(server, 503, f"{victim} has not answered for 1 s")
            assert [answer.result(timeout=60)[0] for answer in answers] == [200] * 8
            wait_for_health(server, 200)
            assert server.said().count(" is restarted in ") == number
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_for_all() == 0


def test_a_server_that_hangs_ends_everything(tmp_path: Path) -> None:
    """So does any process of a single replica."""
    with serving(tmp_path, *SIMULATED) as server, ThreadPoolExecutor(8) as pool:
        answer = pool.submit(server.post, "/v1/completions", prompt="x", **{**BODY, "max_tokens": 1500})
        wait_until(lambda: server.metric("requests_held") == 1)
        os.kill(server.children["server"], signal.SIGSTOP)
        assert server.wait_for_all() == 1
        assert "toka-async: server has not answered for 1 s\n" in server.said()
        assert isinstance(answer.exception(timeout=60), OSError)
