"""The parent's end of a child's pipes: the spec and orders go in, statuses come out. See `procs.child`."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from toka_async.nodes.messages import EndRank, RankOrder, StartRank
from toka_async.procs.child import SIGNALS, ChildSpec, Order, Status, Stop

STOP_TIMEOUT = 3.0  # seconds for a child to exit after the order

STATUSES: msgspec.json.Decoder[Status] = msgspec.json.Decoder(Status)


@dataclass(frozen=True, slots=True)
class Launch:
    """A child to be started. `spec` is the first line on its standard input.

    replica: its replica, -1: none. rank: its rank, if it is one. inherit: descriptors that it keeps under the same
    numbers.
    """

    name: str
    command: Sequence[str]
    spec: bytes
    replica: int = -1
    rank: int = -1
    inherit: Sequence[int] = ()


class Child:
    """A running child. It never outlives this process: Linux kills it when the pipe `_life` loses its only writer.

    The pipe carries nothing. Unlike a thread of the child, the system needs neither Python's lock nor a process that
    runs. Unlike PR_SET_PDEATHSIG, it does not regard the end of the thread that started the child. Until the pipe is
    armed, and on other systems, the end of standard input does the same (`procs.child`).
    """

    def __init__(self, launch: Launch) -> None:
        self.name = launch.name
        self.replica = launch.replica
        self.started = False
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # inherited: none can kill a starting child
        end, self._life = os.pipe()
        try:
            self.process = subprocess.Popen(
                launch.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[*launch.inherit, end],
                bufsize=0,
            )
            kill_at_end(end, self.process.pid)
        finally:
            os.close(end)
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._orders = self.process.stdin
        self.status_fd = self.process.stdout.fileno()
        self._rest = b""
        self.write(launch.spec + b"\n")

    def order(self, order: Order) -> None:
        self.write(msgspec.json.encode(order) + b"\n")

    def read_lines(self) -> list[bytes] | None:
        """Read the statuses since the last call; None: the child has ended. Blocks if there is nothing to read."""
        data = os.read(self.status_fd, 65536)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines if data else None

    def stop(self) -> None:
        """Order the child to exit, and kill it after STOP_TIMEOUT. Returns when it has ended."""
        self.order(Stop())
        with contextlib.suppress(OSError):
            self._orders.close()
        try:
            self.process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        os.close(self._life)

    def kill(self) -> None:
        """Kill the child, which `reap` must follow."""
        self.process.kill()

    def reap(self) -> None:
        """Wait until a killed child has ended, STOP_TIMEOUT at most: a driver may hold it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_TIMEOUT)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        os.close(self._life)

    def describe_end(self) -> str:
        """Wait for the exit of a child whose status pipe has closed, and describe it."""
        try:
            code = self.process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            return f"{self.name} closed its status pipe"
        return (
            f"{self.name} was killed by {_signal_name(-code)}" if code < 0 else f"{self.name} exited with code {code}"
        )

    def write(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError, ValueError):  # the child is dead, or `stop` closed the pipe
            self._orders.write(data)


class RemoteChild:
    """A rank that another machine's agent starts, through the coordinator `via`, from which its statuses come."""

    def __init__(self, launch: Launch, via: Child) -> None:
        self.name = launch.name
        self.replica = launch.replica
        self.started = False
        self._via = via
        via.order(StartRank(launch.name, launch.rank, launch.spec))

    def order(self, order: Order) -> None:
        self._via.order(RankOrder(self.name, msgspec.json.encode(order)))

    def kill(self) -> None:
        """Have the rank killed, before its agent does anything else."""
        self._via.order(EndRank(self.name))

    def reap(self) -> None:
        """Leave it to the agent."""

    def stop(self) -> None:
        """Leave it to the agent, which ends its ranks when the coordinator stops."""


def kill_all(children: Iterable[Child | RemoteChild]) -> None:
    """Kill children at once, and then wait for them: a process that has memory of a GPU takes seconds to end."""
    victims = [*children]
    for child in victims:
        child.kill()
    for child in victims:
        child.reap()


def make_launch(child: ChildSpec) -> Launch:
    return Launch(
        name=child.name,
        command=[sys.executable, *_keep_path_safe(), "-m", "toka_async.procs", child.name],
        spec=msgspec.json.encode(child),
        replica=child.replica if child.role in ("scheduler", "rank") else -1,
        rank=child.rank if child.role == "rank" else -1,
        inherit=[fd for fd in (child.listen_fd, child.group_fd) if fd >= 0],
    )


def kill_at_end(pipe: int, pid: int) -> None:
    """Have the system kill the process `pid` when nobody can write to the pipe any more. The process keeps it open."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a sandbox may lack such signals
            fcntl.fcntl(pipe, fcntl.F_SETOWN, pid)
            fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)


def _keep_path_safe() -> list[str]:
    """Return the option with which a Python imports nothing from the working directory, if this one does not either.

    With `-m` it would, and the working directory may be that of a checkpoint with files named like packages.
    """
    return [] if {"", str(Path.cwd())} & {*sys.path} else ["-P"]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
