from __future__ import annotations

import fcntl
import json
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from tests.drivers.until import SECONDS, wait_until
from toka_async.checkpoint.hub import resolve_model
from toka_async.checkpoint.spec import read_spec
from toka_async.config import Config
from toka_async.procs.child import ChildSpec, Drain, Fail, Order, Stop
from toka_async.topology import local_topology

CHILD = """
import signal, sys
from toka_async.procs.child import Drained, Started, connect_parent
link = connect_parent()
"""


def spec(folder: Path, role: Literal["rank", "coordinator"] = "rank") -> bytes:
    child = ChildSpec(
        role=role,
        replica=1,
        rank=2,
        config=Config(),
        topology=local_topology(folder),
        model_dir="m",
        tokenizer_dir="t",
        served_name="s",
        shape=read_spec(resolve_model("demo")),
    )
    return msgspec.json.encode(child) + b"\n"


class Running:
    """A child running a program, this process being its parent."""

    def __init__(
        self, program: str, folder: Path, *, rest: bytes = b"", role: Literal["rank", "coordinator"] = "rank"
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD + program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
        )
        self.send(spec(folder, role) + rest)

    def send(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)

    @property
    def num_unread(self) -> int:
        """Bytes of what it was sent that it has not read."""
        assert self.process.stdin is not None
        (count,) = struct.unpack("i", fcntl.ioctl(self.process.stdin, termios.FIONREAD, bytes(4)))
        return int(count)

    def status(self) -> dict[str, object]:
        assert self.process.stdout is not None
        status: dict[str, object] = json.loads(self.process.stdout.readline())
        return status

    def end(self) -> tuple[int, str]:
        """(exit code, standard error), without closing standard input first."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        code = self.process.wait(SECONDS)
        err = self.process.stderr.read().decode()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            pipe.close()
        return code, err


def order(order: Order) -> bytes:
    return msgspec.json.encode(order) + b"\n"


def test_names(tmp_path: Path) -> None:
    child = msgspec.json.decode(spec(tmp_path), type=ChildSpec)
    assert child.name == "rank-1-2"
    assert msgspec.structs.replace(child, role="scheduler").name == "scheduler-1"
    assert msgspec.structs.replace(child, role="server").name == "server"


def test_names_of_what_serves_several_machines(tmp_path: Path) -> None:
    child = msgspec.json.decode(spec(tmp_path), type=ChildSpec)
    assert msgspec.structs.replace(child, role="coordinator").name == "coordinator"
    assert msgspec.structs.replace(child, role="node").name == "node-0"


def test_a_coordinators_orders_wait_until_it_hears_them(tmp_path: Path) -> None:
    program = """
seen = []
def on_order(order):
    seen.append(order)
    link.report(Drained(len(seen)))
link.on_stop = lambda: link.report(Started())
signal.signal(signal.SIGUSR1, lambda *_: link.hear(on_order))
link.report(Drained(0))
while True:
    signal.pause()
"""
    child = Running(program, tmp_path, role="coordinator")
    assert child.status()["num_cut"] == 0
    child.send(order(Fail("a")) + order(Fail("b")) + order(Stop()))
    wait_until(lambda: child.num_unread == 0)
    child.process.send_signal(signal.SIGUSR1)
    assert [child.status()["num_cut"] for _ in range(2)] == [1, 2]
    assert child.status() == {"type": "Started"}
    assert child.end() == (0, "")


def test_a_child_that_is_told_to_stop_ends(tmp_path: Path) -> None:
    child = Running("link.report(Started()); signal.pause()", tmp_path)
    assert child.status() == {"type": "Started"}
    child.send(order(Stop()))
    assert child.end() == (0, "")


def test_the_end_of_standard_input_is_the_parents_end(tmp_path: Path) -> None:
    child = Running("link.report(Started()); signal.pause()", tmp_path)
    child.status()
    assert child.process.stdin is not None
    child.process.stdin.close()
    assert child.end() == (0, "")


def test_orders_arrive_whole_and_in_order(tmp_path: Path) -> None:
    program = """
seen = []
def on_order(order):
    seen.append(order.seconds)
    link.report(Drained(int(order.seconds)))
link.on_order = on_order
link.report(Started())
signal.pause()
"""
    child = Running(program, tmp_path)
    child.status()
    data = order(Drain(1)) + order(Drain(2)) + order(Drain(3))
    for part in (data[:10], data[10:50], data[50:]):
        child.send(part)
        wait_until(lambda: not child.num_unread)
    assert [child.status()["num_cut"] for _ in range(3)] == [1, 2, 3]
    assert child.process.stdin is not None
    child.process.stdin.close()
    assert child.end()[0] == 0


def test_an_order_to_a_child_that_takes_none_ends_it(tmp_path: Path) -> None:
    assert Running("signal.pause()", tmp_path, rest=order(Drain(1))).end() == (0, "")


def test_signals_are_the_parents_business(tmp_path: Path) -> None:
    child = Running("link.on_order = lambda _: link.exit(5); link.report(Started()); signal.pause()", tmp_path)
    child.status()
    child.process.send_signal(signal.SIGINT)
    child.process.send_signal(signal.SIGTERM)
    child.send(order(Drain(1)))
    assert child.end() == (5, "")


def test_prints_do_not_reach_the_status_pipe(tmp_path: Path) -> None:
    child = Running("print('from a library', flush=True); link.report(Started()); link.exit()", tmp_path)
    assert child.status() == {"type": "Started"}
    assert child.end() == (0, "from a library\n")


def test_standard_input_is_empty(tmp_path: Path) -> None:
    child = Running("assert sys.stdin.read() == ''; link.report(Started()); link.exit()", tmp_path)
    assert child.status() == {"type": "Started"}
    assert child.end() == (0, "")


@pytest.mark.parametrize("user", [False, True])
def test_fatal_is_one_line(tmp_path: Path, user: bool) -> None:
    child = Running(f"link.fatal('a\\nb', user={user})", tmp_path)
    assert child.status() == {"type": "Fatal", "message": "a b", "user": user}
    assert child.end() == (1, "")


def test_logs_carry_the_name(tmp_path: Path) -> None:
    child = Running("import logging; logging.getLogger('x').info('hello'); link.exit()", tmp_path)
    _, err = child.end()
    assert err.endswith(" rank-1-2: hello\n")


def test_a_parent_that_is_gone_before_the_spec() -> None:
    done = subprocess.run([sys.executable, "-c", CHILD], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_an_exception_is_reported_with_its_trace(tmp_path: Path) -> None:
    program = """
from toka_async.procs import __main__ as entry
def run(link): raise RuntimeError("what happened")
entry.run, entry.connect_parent = run, lambda: link
entry.main()
"""
    child = Running(program, tmp_path)
    assert child.status() == {"type": "Fatal", "message": "RuntimeError: what happened", "user": False}
    code, err = child.end()
    assert code == 1
    assert "Traceback" in err
