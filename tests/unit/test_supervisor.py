"""The supervisor with small real processes: start, failure, draining, signals, and that nobody is left behind."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes.children import SAY, command
from tests.processes.serving import wait_until_gone
from toka_async import restarts
from toka_async import supervisor as module
from toka_async.nodes.messages import RankOrder
from toka_async.procs import launched
from toka_async.procs.child import Beat, Finished, Prepare, Prepared, Status
from toka_async.procs.launched import Child, Launch
from toka_async.supervisor import Supervisor

WORKER = SAY + "started(); read()"
SERVER = (
    SAY
    + """
started()
order = read()
if b"Drain" in order:
    say('{"type":"Drained","num_cut":%d}' % CUT)
elif b"Fail" in order:
    sys.stderr.write("clients hear: " + order.decode())
"""
)
DEAF = SAY + "started(); signal.pause()"
INTERRUPT = "os.kill(os.getppid(), signal.SIGTERM)"


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in (module, launched):
        monkeypatch.setattr(each, "STOP_TIMEOUT", 0.5)
    monkeypatch.setattr(module, "FAIL_TIMEOUT", 0.5)


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    """A supervisor whose children are all gone afterwards."""
    with Supervisor(drain_timeout=0.3) as running:
        yield running
        children = [child for child in running._children if isinstance(child, Child)]
    assert all(child.process.returncode is not None for child in children)


def start(supervisor: Supervisor, *programs: str, cut: int = 0) -> list[Child]:
    names = ["server", "scheduler-0", "rank-0-0"]
    return [
        supervisor.start(Launch(name, command(program, CUT=cut), b"spec"))
        for name, program in zip(names, programs, strict=False)
    ]


def interrupt(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_drains_and_stops(supervisor: Supervisor, number: int, capfd: pytest.CaptureFixture[str]) -> None:
    start(supervisor, SERVER, WORKER, WORKER)
    assert supervisor.run(lambda: interrupt(number)) == 0
    err = capfd.readouterr().err
    assert "finishing running requests" in err
    assert err.endswith("toka-async: stopped\n")


def test_says_how_many_requests_were_cut(supervisor: Supervisor, capfd: pytest.CaptureFixture[str]) -> None:
    start(supervisor, SERVER, WORKER, cut=3)
    assert supervisor.run(interrupt) == 0
    assert "3 requests did not finish" in capfd.readouterr().err


def test_a_server_that_does_not_drain_is_stopped(supervisor: Supervisor, capfd: pytest.CaptureFixture[str]) -> None:
    start(supervisor, DEAF, WORKER)
    assert supervisor.run(interrupt) == 1
    assert "did not finish in time" in capfd.readouterr().err


def test_a_second_signal_stops_at_once(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "ECHO", 0.0)
    supervisor._drain_timeout = 60
    start(supervisor, SAY + f"started(); read(); {INTERRUPT}; signal.pause()", WORKER)
    assert supervisor.run(interrupt) == 1
    assert "second signal" in capfd.readouterr().err.splitlines()[-1]


def test_the_same_signal_twice_is_one(supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ECHO", 60.0)
    start(supervisor, SAY + f'started(); read(); {INTERRUPT}; say(\'{{"type":"Drained","num_cut":0}}\')', WORKER)
    assert supervisor.run(interrupt) == 0


def test_a_signal_before_the_start_is_done(supervisor: Supervisor, capfd: pytest.CaptureFixture[str]) -> None:
    start(supervisor, SERVER, SAY + f"{INTERRUPT}; signal.pause()")
    assert supervisor.run(lambda: pytest.fail("it did not start")) == 0
    assert "stopped before it was ready" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("end", "what"),
    [
        ("os.kill(os.getpid(), 9)", "scheduler-0 was killed by SIGKILL"),
        ("os.kill(os.getpid(), 35)", "scheduler-0 was killed by signal 35"),
        ("os._exit(0)", "scheduler-0 exited with code 0"),
        ("os._exit(7)", "scheduler-0 exited with code 7"),
        ('say(\'{"type":"Fatal","message":"out of luck"}\')', "scheduler-0: out of luck"),
        ("os.close(1); signal.pause()", "scheduler-0 closed its status pipe"),
    ],
)
def test_a_death_is_named_and_told_to_clients(
    supervisor: Supervisor, end: str, what: str, capfd: pytest.CaptureFixture[str]
) -> None:
    _, scheduler, _ = start(supervisor, SERVER, SAY + f"started(); read(); {end}", WORKER)
    assert supervisor.run(lambda: scheduler.order(Beat())) == 1
    err = capfd.readouterr().err
    assert f"toka-async: {what}\n" in err
    assert f'clients hear: {{"type":"Fail","reason":"{what}"}}' in err


def test_a_users_error_during_the_start(supervisor: Supervisor, capfd: pytest.CaptureFixture[str]) -> None:
    fatal = '{"type":"Fatal","message":"tensor x is missing","user":true}'
    start(supervisor, SAY + "read()", SAY + f"say('{fatal}')", SAY + "signal.pause()")
    assert supervisor.run(lambda: pytest.fail("it did not start")) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.endswith(" ERROR toka-async: tensor x is missing")


def test_children_inherit_only_what_they_are_given(supervisor: Supervisor, tmp_path: Path) -> None:
    own = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    program = SAY + f"os.fstat({own}); started(); read()"
    supervisor.start(Launch("server", command(program), b"spec", inherit=[own]))
    second = supervisor.start(Launch("rank-0-0", command(program), b"spec"))
    assert supervisor.run(lambda: pytest.fail("the second has no such descriptor")) == 1
    assert second.process.returncode == 1
    os.close(own)


PARENT = """
import sys
from toka_async.procs.launched import Launch
from toka_async.supervisor import Supervisor
with Supervisor(drain_timeout=1) as supervisor:
    for name in ("server", "rank-0-0"):
        child = supervisor.start(Launch(name, [sys.executable, "-I", "-S", "-c", PROGRAM], b"spec"))
        print(child.process.pid, flush=True)
    supervisor.run(lambda: print("started", flush=True))
"""


@pytest.mark.parametrize(
    "program",
    [
        WORKER,
        SAY + "started()\nwhile True: pass",
        SAY + "started(); os.kill(os.getpid(), signal.SIGSTOP)",
    ],
    ids=["waits", "is busy", "is stopped"],
)
def test_a_killed_parent_leaves_no_children(program: str) -> None:
    command = [sys.executable, "-c", f"PROGRAM = {program!r}\n{PARENT}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        assert parent.stdout.readline() == "started\n"
        parent.kill()
    wait_until_gone(pids)


def test_a_child_outlives_the_thread_that_started_it(supervisor: Supervisor) -> None:
    thread = threading.Thread(target=start, args=(supervisor, SERVER))
    thread.start()
    thread.join()
    assert supervisor.run(interrupt) == 0


def test_nothing_is_asked_while_nothing_happens(supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    start(supervisor, SERVER, WORKER)
    select, timeouts = supervisor._selector.select, list[float | None]()

    def waited(timeout: float | None) -> Any:
        timeouts.append(timeout)
        return select(timeout)

    monkeypatch.setattr(supervisor._selector, "select", waited)
    assert supervisor.run(interrupt) == 0
    *before, _ = timeouts
    assert set(before) == {None}, "it waits for events, and for a time only while the server drains"


LOSER = """
started()
for line in sys.stdin.buffer.raw:
    sys.stderr.write("told: " + line.decode())
    if b"Drain" in line:
        say('{"type":"Drained","num_cut":0}')
"""


class Replicas:
    """A server that repeats what it is told, and children of two replicas; `programs` by replica and life."""

    def __init__(self, *programs: list[str]) -> None:
        self.programs = programs
        self.launched: list[tuple[int, int]] = []

    def launch(self, replica: int, life: int) -> list[Launch]:
        self.launched.append((replica, life))
        program = self.programs[replica][min(life, len(self.programs[replica]) - 1)]
        return [
            Launch(f"scheduler-{replica}", command(WORKER), b"spec", replica),
            Launch(f"rank-{replica}-0", command(program), b"spec", replica),
        ]

    def run(self, victim: str = "") -> int:
        """To the end, which is that a replica is back (`ends_when_back`) or all there is to do.

        victim: the child that is killed once all have started.
        """
        with Supervisor(0.3, self.launch) as supervisor:
            supervisor.start(Launch("server", command(SAY + LOSER), b"spec"))
            for replica in range(2):
                for launch in self.launch(replica, 0):
                    supervisor.start(launch)
            children = [child for child in supervisor._children if isinstance(child, Child)]

            def kill() -> None:
                for child in children:
                    if child.name == victim:
                        child.process.kill()

            code = supervisor.run(kill)
        assert all(child.process.returncode is not None for child in children)
        return code


@pytest.fixture
def ends_when_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if someone stopped everything as soon as a replica is back; restarts come soon."""
    succeeded = restarts.Restarts.note_success

    def end(self: restarts.Restarts, replica: int) -> None:
        succeeded(self, replica)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(restarts, "FIRST_DELAY", 0.05)
    monkeypatch.setattr(restarts.Restarts, "note_success", end)


@pytest.mark.usefixtures("ends_when_back")
def test_a_lost_replica_is_started_again(capfd: pytest.CaptureFixture[str]) -> None:
    replicas = Replicas([WORKER], [WORKER])
    assert replicas.run("rank-1-0") == 0
    assert replicas.launched == [(0, 0), (1, 0), (1, 1)]
    err = capfd.readouterr().err
    assert 'told: {"type":"Lost","replica":1,"life":1,"reason":"rank-1-0 was killed by SIGKILL"}' in err
    assert "toka-async: rank-1-0 was killed by SIGKILL; replica 1 is restarted in 0.05 s\n" in err
    assert "toka-async: replica 1 is back\n" in err


@pytest.mark.usefixtures("ends_when_back")
def test_one_that_fails_again_waits_longer(capfd: pytest.CaptureFixture[str]) -> None:
    replicas = Replicas([WORKER, SAY + "os._exit(3)", WORKER], [WORKER])
    assert replicas.run("rank-0-0") == 0
    assert replicas.launched == [(0, 0), (1, 0), (0, 1), (0, 2)]
    err = capfd.readouterr().err
    assert "rank-0-0 exited with code 3; replica 0 is restarted in 0.1 s" in err
    assert err.count("replica 0 is back") == 1


def test_a_death_before_all_have_started_ends_the_start(capfd: pytest.CaptureFixture[str]) -> None:
    replicas = Replicas([WORKER], [SAY + "os._exit(3)"])
    assert replicas.run() == 1
    assert "rank-1-0 exited with code 3\n" in capfd.readouterr().err
    assert len(replicas.launched) == 2


def test_the_servers_death_ends_all_replicas(capfd: pytest.CaptureFixture[str]) -> None:
    with Supervisor(0.3, Replicas([WORKER], [WORKER]).launch) as supervisor:
        supervisor.start(Launch("server", command(SAY + "started(); os._exit(4)"), b"spec"))
        supervisor.start(Launch("rank-0-0", command(WORKER), b"spec", 0))
        assert supervisor.run(lambda: None) == 1
    assert "server exited with code 4\n" in capfd.readouterr().err


@pytest.mark.parametrize("when", ["before all have started", "later"])
def test_a_child_can_say_what_ends_all(when: str) -> None:
    finished = 'say(\'{"type":"Finished","completed":3,"failed":0}\'); '
    program = (
        SAY + ("" if when == "later" else finished) + "started(); " + (finished if when == "later" else "") + "read()"
    )
    said: list[Status] = []

    def on_status(status: Status) -> int | None:
        said.append(status)
        return 7 if isinstance(status, Finished) else None

    with Supervisor(drain_timeout=0.3, on_status=on_status) as supervisor:
        supervisor.start(Launch("batch", command(program), b"spec"))
        supervisor.start(Launch("rank", command(WORKER), b"spec"))
        assert supervisor.run(lambda: None) == 7
    assert said[-1] == Finished(3, 0)


def test_a_hangup_that_nohup_has_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Supervisor(5.0):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


# A coordinator that plays the ranks it is told to start. All end when one of them gets an order.
COORDINATOR = """
import json
started()
while True:
    line = read()
    order = json.loads(line) if line else {"type": "Stop"}
    if order["type"] == "Prepare":
        keys = {"public": "", "secret": ""}
        say(json.dumps({**order, "type": "Prepared", "ranks": [], "group": "", "keys": keys}))
    elif order["type"] == "StartRank":
        say(json.dumps({"type": "RankLine", "name": order["name"], "line": STARTED}))
    elif order["type"] == "RankOrder":
        for name in ("rank-0-0", "rank-0-1", "rank-9-9"):
            say(json.dumps({"type": "RankGone", "name": name, "message": name + " fell with node 1"}))
    elif order["type"] == "EndRank":
        sys.stderr.write("kills " + order["name"] + "\\n")
    elif order["type"] == "Stop":
        break
"""


@pytest.mark.usefixtures("ends_when_back")
def test_ranks_of_other_machines_are_children_too(capfd: pytest.CaptureFixture[str]) -> None:
    """One that is lost ends its replica, whose next life starts when the machines have prepared it."""
    lives: list[int] = []
    status = base64.b64encode(b'{"type":"Started"}').decode()

    def prepare(replica: int, life: int) -> list[Launch]:
        coordinator.order(Prepare(replica, life))
        return []

    def on_status(status: Status) -> None:
        if isinstance(status, Prepared):
            lives.append(status.life)
            supervisor.start(Launch("scheduler-0", command(WORKER), b"spec", 0))
            for rank in range(2):
                supervisor.start_remote(Launch(f"rank-0-{rank}", (), b"spec", 0, rank), coordinator)

    with Supervisor(0.3, prepare, on_status) as supervisor:
        supervisor.start(Launch("server", command(SAY + LOSER), b"spec"))
        coordinator = supervisor.start(Launch("coordinator", command(SAY + COORDINATOR, STARTED=status), b"spec"))
        prepare(0, 0)
        supervisor.run(lambda: coordinator.order(RankOrder("rank-0-0", b"")))
    assert lives == [0, 1]
    err = capfd.readouterr().err
    assert err.count("rank-0-0 fell with node 1; replica 0 is restarted in ") == 1
    assert "kills rank-0-0\nkills rank-0-1\n" in err
