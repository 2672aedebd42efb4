"""Ends of all kinds: deaths, signals, a killed parent. Clients hear of it, and no process is left behind."""

from __future__ import annotations

import os
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.drivers.until import wait_until
from tests.processes.serving import Serving, serving, wait_until_gone

pytestmark = pytest.mark.usefixtures("socket_folders")
LONG = {"model": "demo", "prompt": "Question:", "max_tokens": 1900, "ignore_eos": True}
SIMULATED = ("model.device=simulated", "simulated.step_ms=2")
SHORT = {"model": "demo", "prompt": "Question:", "max_tokens": 300, "ignore_eos": True}


def start_long(server: Serving, pool: ThreadPoolExecutor) -> tuple[Future[tuple[int, Any]], Any]:
    """A request that waits for its whole answer, and one whose stream has begun."""
    whole = pool.submit(server.post, "/v1/completions", **LONG)
    events = server.stream("/v1/completions", **LONG)
    next(events)
    wait_until(lambda: server.metric("requests_held") == 2)
    return whole, events


@pytest.mark.parametrize(
    ("victim", "options"),
    [
        ("rank-0-0", SIMULATED),
        ("scheduler-0", SIMULATED),
        ("rank-0-0", ("parallel.tp=2",)),
        ("rank-0-1", ("parallel.tp=2",)),
    ],
)
def test_a_killed_child_ends_everything_and_clients_hear_why(
    tmp_path: Path, socket_folders: Path, victim: str, options: tuple[str, ...]
) -> None:
    with serving(tmp_path, *options) as server, ThreadPoolExecutor() as pool:
        whole, events = start_long(server, pool)
        os.kill(server.children[victim], signal.SIGKILL)
        status, answer = whole.result(timeout=60)
        assert status == 500
        assert f"{victim} was killed by SIGKILL" in answer["error"]["message"]
        *_, last = events
        assert f"{victim} was killed by SIGKILL" in last["error"]["message"]
        assert server.wait_for_all() == 1
        assert f"toka-async: {victim} was killed by SIGKILL\n" in server.said()
        assert not list(socket_folders.iterdir())


def test_a_killed_server_ends_everything(tmp_path: Path, socket_folders: Path) -> None:
    with serving(tmp_path, *SIMULATED) as server, ThreadPoolExecutor() as pool:
        whole, events = start_long(server, pool)
        os.kill(server.children["server"], signal.SIGKILL)
        assert isinstance(whole.exception(timeout=60), OSError)
        assert all(event["choices"][0]["finish_reason"] is None for event in events)  # it breaks off
        assert server.wait_for_all() == 1
        assert "toka-async: server was killed by SIGKILL\n" in server.said()
        assert not list(socket_folders.iterdir())


def test_a_killed_parent_takes_its_children_along(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        events = server.stream("/v1/completions", **LONG)
        next(events)
        server.process.kill()
        server.wait()
        wait_until_gone(server.pids)
        events.close()


def test_a_killed_parent_takes_a_stopped_child_along(tmp_path: Path) -> None:
    """Which would keep the address for itself."""
    with serving(tmp_path, *SIMULATED) as server:
        os.kill(server.children["server"], signal.SIGSTOP)
        server.process.kill()
        server.wait()
        wait_until_gone(server.pids)


def test_a_start_removes_what_was_left_when_all_were_killed(tmp_path: Path, socket_folders: Path) -> None:
    with serving(tmp_path, *SIMULATED) as server:
        server.signal_group(signal.SIGKILL)
        server.wait()
        (left,) = socket_folders.iterdir()
    with serving(tmp_path, *SIMULATED) as first:
        (folder,) = socket_folders.iterdir()
        assert folder != left
        with serving(tmp_path, *SIMULATED):
            assert len(list(socket_folders.iterdir())) == 2, "that of a server that runs stays"
            first.process.send_signal(signal.SIGTERM)
            assert first.wait() == 0


@pytest.mark.parametrize(
    ("number", "to_group", "options"),
    [(signal.SIGTERM, False, SIMULATED), (signal.SIGINT, True, ()), (signal.SIGHUP, True, SIMULATED)],
)
def test_a_signal_lets_running_requests_finish(
    tmp_path: Path, socket_folders: Path, number: int, to_group: bool, options: tuple[str, ...]
) -> None:
    with serving(tmp_path, *options) as server, ThreadPoolExecutor() as pool:
        events = server.stream("/v1/completions", **SHORT)
        first = next(events)  # it may have all tokens
        whole = pool.submit(server.post, "/v1/completions", **SHORT)
        wait_until(lambda: server.metric("requests_held") == 2 or whole.done())
        if to_group:
            server.signal_group(number)
        else:
            server.process.send_signal(number)
        *_, last = first, *events
        assert last["choices"][0]["finish_reason"] == "length"
        status, answer = whole.result(timeout=60)
        assert status == 200
        assert answer["usage"]["completion_tokens"] == 300
        assert server.wait_for_all() == 0
        assert server.said().endswith("toka-async: stopped\n")
        assert not list(socket_folders.iterdir())


def test_requests_that_take_too_long_are_cut_with_an_error(tmp_path: Path) -> None:
    with serving(tmp_path, *SIMULATED, "server.drain_timeout=0.3") as server, ThreadPoolExecutor() as pool:
        whole, events = start_long(server, pool)
        server.signal_group(signal.SIGTERM)
        status, answer = whole.result(timeout=60)
        assert status == 500
        assert "shutting down" in answer["error"]["message"]
        *_, last = events
        assert "shutting down" in last["error"]["message"]
        assert server.wait_for_all() == 0
        assert "2 requests did not finish" in server.said()


def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    with serving(tmp_path, *SIMULATED) as server, ThreadPoolExecutor() as pool:
        whole, events = start_long(server, pool)

        def signalled() -> bool:
            server.process.send_signal(signal.SIGTERM)  # signals within a second are one
            return "stopped at once" in server.said()

        wait_until(signalled)
        assert server.wait_for_all() == 1
        assert isinstance(whole.exception(timeout=60), OSError)
        events.close()
