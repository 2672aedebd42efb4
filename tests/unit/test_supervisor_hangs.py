from __future__ import annotations

import os
import signal
import threading

import pytest

from tests.processes.children import SAY, command
from toka_async import restarts
from toka_async import supervisor as module
from toka_async.procs import launched
from toka_async.procs.launched import Child, Launch
from toka_async.supervisor import Supervisor

ANSWERS = (
    SAY
    + """
started()
num_beats = 0
for line in sys.stdin.buffer.raw:
    sys.stderr.write(f"{NAME} is told: " + line.decode())
    if b"Beat" in line:
        num_beats += 1
        if num_beats == ENOUGH:
            os.kill(os.getppid(), signal.SIGTERM)
        say('{"type":"Alive","memory":[1,2,3]}' if NAME == "rank" else '{"type":"Alive"}')
    elif b"Drain" in line:
        say('{"type":"Drained","num_cut":0}')
    elif b"Stop" in line or b"Fail" in line:
        break
"""
)
STOPPED = SAY + "started(); os.kill(os.getpid(), signal.SIGSTOP)"


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in (module, launched):
        monkeypatch.setattr(each, "STOP_TIMEOUT", 0.5)
    monkeypatch.setattr(module, "FAIL_TIMEOUT", 0.5)


def answers(name: str, enough: int = 0) -> list[str]:
    """A child that answers its beats, and ends the supervisor at the one that is `enough`."""
    return command(ANSWERS, NAME=name, ENOUGH=enough)


def run_to_the_end(supervisor: Supervisor) -> int:
    """Until a child says that it is enough, or far too long."""
    too_late = threading.Timer(30, os.kill, (os.getpid(), signal.SIGTERM))
    too_late.start()
    try:
        return supervisor.run(lambda: None)
    finally:
        too_late.cancel()


def test_a_child_that_hangs_ends_everything(capfd: pytest.CaptureFixture[str]) -> None:
    with Supervisor(0.3, hang_timeout=0.4) as supervisor:
        supervisor.start(Launch("server", answers("server"), b"spec"))
        supervisor.start(Launch("scheduler-0", answers("scheduler"), b"spec", 0))
        supervisor.start(Launch("rank-0-0", command(STOPPED), b"spec", 0))
        assert supervisor.run(lambda: None) == 1
        children = [child for child in supervisor._children if isinstance(child, Child)]
    assert [child.process.returncode for child in children] == [0, 0, -signal.SIGKILL]
    err = capfd.readouterr().err
    assert "toka-async: rank-0-0 has not answered for 0.4 s\n" in err
    assert 'server is told: {"type":"Silent","names":["rank-0-0"]}' in err
    assert '"type":"Fail","reason":"rank-0-0 has not answered for 0.4 s"' in err


def test_a_replica_that_hangs_is_killed_and_started_again(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "FIRST_DELAY", 0.05)
    lives: list[int] = []

    def launch(replica: int, life: int) -> list[Launch]:
        lives.append(life)
        program = answers("rank", enough=3) if life else command(STOPPED)
        return [Launch(f"rank-{replica}-0", program, b"spec", replica)]

    with Supervisor(0.3, launch, hang_timeout=0.4) as supervisor:
        supervisor.start(Launch("server", answers("server"), b"spec"))
        supervisor.start(launch(0, 0)[0])
        assert run_to_the_end(supervisor) == 0
    assert lives == [0, 1]
    err = capfd.readouterr().err
    assert "rank-0-0 has not answered for 0.4 s; replica 0 is restarted in 0.05 s\n" in err
    assert "replica 0 is back\n" in err
    assert 'server is told: {"type":"Memory","name":"rank-0-0","memory":[1,2,3]}' in err
    assert err.index('"names":["rank-0-0"]') < err.index('"type":"Lost"') < err.index('"names":[]')


def test_a_replica_that_hangs_while_it_starts_again_is_started_once_more(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later than one that runs; and whoever was silent for long by the time it has started is not blamed for that."""
    monkeypatch.setattr(restarts, "FIRST_DELAY", 0.05)
    monkeypatch.setattr(module, "START_PATIENCE", 5)
    slow = SAY + "time.sleep(0.7)\n" + ANSWERS.removeprefix(SAY)
    programs = [SAY + "started(); read(); os.kill(os.getpid(), 9)", SAY + "os.kill(os.getpid(), signal.SIGSTOP)", slow]
    lives: list[int] = []

    def launch(replica: int, life: int) -> list[Launch]:
        lives.append(life)
        return [Launch(f"rank-{replica}-0", command(programs[life], NAME="rank", ENOUGH=2), b"spec", replica)]

    with Supervisor(0.3, launch, hang_timeout=0.4) as supervisor:
        supervisor.start(Launch("server", answers("server"), b"spec"))
        supervisor.start(launch(0, 0)[0])
        assert run_to_the_end(supervisor) == 0
    assert lives == [0, 1, 2]
    err = capfd.readouterr().err
    assert "rank-0-0 has not answered for 2 s; replica 0 is restarted in 0.1 s\n" in err
    assert err.count("replica 0 is back\n") == 1
    assert '"names":["rank-0-0"]' not in err.partition('"life":1')[2], "it is away, which the server knows"


def test_a_slow_start_is_no_hang(capfd: pytest.CaptureFixture[str]) -> None:
    slow = SAY + "time.sleep(1.0)\n" + ANSWERS.removeprefix(SAY)
    with Supervisor(0.3, hang_timeout=0.6) as supervisor:
        supervisor.start(Launch("server", answers("server"), b"spec"))
        supervisor.start(Launch("rank-0-0", command(slow, NAME="rank", ENOUGH=2), b"spec", 0))
        assert run_to_the_end(supervisor) == 0
    assert "not answered" not in capfd.readouterr().err
