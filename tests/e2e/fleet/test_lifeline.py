"""Nothing of a server outlives whoever started it, nor its own parts; and no two lives have one GPU at a time."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.drivers.until import wait_until
from tests.processes.serving import SMALL, alive, list_session, serving, wait_until_gone
from toka_async.bench.loads.served import list_children

pytestmark = pytest.mark.usefixtures("socket_folders")
LONG = {"model": "demo", "prompt": "Question:", "max_tokens": 1900, "ignore_eos": True, "stream": True}
SIMULATED = ("model.device=simulated", "simulated.step_ms=5", "simulated.gpu=pretended")
NUM_PROCESSES = 4  # of a server with one rank
STARTER = """
import subprocess, sys
server = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE)
server.wait()
"""


def command(locks: Path, *overrides: str) -> list[str]:
    serve = [sys.executable, "-m", "toka_async.cli", "serve", "--lifeline", *SMALL, *SIMULATED]
    return [*serve, f"parallel.gpu_locks={locks}", *overrides]


@contextmanager
def started(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A process that starts a server and holds its lifeline; all is gone afterwards."""
    with (folder / "stderr").open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", STARTER, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
            text=True,
        )
    assert process.stdout is not None
    try:
        yield process
    finally:
        for pid in list_session(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def find_process(starter: int, name: str) -> int:
    """The process id of the starter itself, of the engine's parent, or of one of its children; 0: it is not there."""
    if name == "starter":
        return starter
    (parent,) = list_children(starter).values()
    return parent if name == "parent" else list_children(parent).get(name, 0)


def said(folder: Path) -> str:
    return (folder / "stderr").read_text()


@pytest.mark.parametrize("victim", ["starter", "parent", "server", "scheduler-0", "rank-0-0"])
def test_a_killed_part_ends_all_under_load(tmp_path: Path, victim: str) -> None:
    with started(tmp_path, *command(tmp_path)) as starter:
        assert starter.stdout is not None
        url = starter.stdout.readline().split()[-1]
        headers = {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"{url}/v1/completions", json.dumps(LONG).encode(), headers)
        with urllib.request.urlopen(asked, timeout=60) as answer:
            assert answer.readline().startswith(b"data: ")
            session = list_session(starter.pid)
            assert len(session) == NUM_PROCESSES + 1
            os.kill(find_process(starter.pid, victim), signal.SIGKILL)
            wait_until_gone(session)


@pytest.mark.parametrize("victim", ["starter", "parent", "server", "scheduler-0", "rank-0-0"])
def test_a_killed_part_ends_all_while_loading(tmp_path: Path, victim: str) -> None:
    """It loads as long as this process holds the lock of its GPU."""
    with (
        (tmp_path / "toka-async-pretended-0.lock").open("w") as lock,
        started(tmp_path, *command(tmp_path)) as starter,
    ):
        lock.write("123\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        wait_until(lambda: "pretended-0: process 123 uses it" in said(tmp_path))
        session = list_session(starter.pid)
        assert len(session) == NUM_PROCESSES + 1
        os.kill(find_process(starter.pid, victim), signal.SIGKILL)
        wait_until_gone(session)


def test_a_new_life_waits_for_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "second").mkdir()
    with started(tmp_path, *command(tmp_path)) as first:
        assert first.stdout is not None
        assert first.stdout.readline()
        rank = find_process(first.pid, "rank-0-0")
        with started(tmp_path / "second", *command(tmp_path)) as second:
            assert second.stdout is not None
            wait_until(lambda: f"pretended-0: process {rank} uses it" in said(tmp_path / "second"))
            first.kill()
            assert second.stdout.readline()
            assert not alive([rank])


def test_a_restarted_replica_locks_its_gpu_again(tmp_path: Path) -> None:
    locks = f"parallel.gpu_locks={tmp_path}"
    with serving(tmp_path, *SIMULATED, locks, "parallel.dp=2") as server:
        lost = server.children["rank-1-0"]
        os.kill(lost, signal.SIGKILL)
        wait_until(lambda: "replica 1 is back" in server.said())
        back = list_children(server.process.pid)["rank-1-0"]
        holders = [int((tmp_path / f"toka-async-pretended-{i}.lock").read_text()) for i in range(2)]
        assert holders == [server.children["rank-0-0"], back]
        wait_until_gone([lost])


def test_engines_that_start_at_once_do_not_wait_for_each_other_in_a_circle(tmp_path: Path) -> None:
    """While one has not got its first GPU, it holds no other, so the one that has the first gets all."""
    first = tmp_path / "toka-async-pretended-0.lock"
    with first.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with started(tmp_path, *command(tmp_path, "parallel.dp=2")) as starter:
            wait_until(lambda: "pretended-0: another process uses it" in said(tmp_path))
            with (tmp_path / "toka-async-pretended-1.lock").open("w") as second:
                fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock.close()
            assert starter.stdout is not None
            assert "serving" in starter.stdout.readline()


def test_any_descriptor_can_be_the_lifeline(tmp_path: Path) -> None:
    """What comes through it means nothing."""
    end, held = os.pipe()
    words = [word if word != "--lifeline" else f"--lifeline-fd={end}" for word in command(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, pass_fds=[end]) as process:
        os.close(end)
        assert process.stdout is not None
        assert b"serving" in process.stdout.readline()
        children = list_children(process.pid)
        os.write(held, b"hello")
        assert process.poll() is None
        os.close(held)
        assert process.wait(60) == 1
    wait_until_gone(children.values())


def test_a_lifeline_that_is_not_open_is_a_mistake() -> None:
    words = [sys.executable, "-m", "toka_async.cli", "serve", "--lifeline-fd", "57"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--lifeline: there is no open descriptor 57" in done.stderr
