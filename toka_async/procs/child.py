"""What every child process shares: its spec, the pipes to its parent, and how it ends.

Standard input is a child's lifeline and order channel: the first line is its spec, later lines are orders, and the end
of it means that the parent was killed (it says Stop otherwise), so the child exits at once, whatever its main thread
does; Linux continues one that is stopped for that. Standard output carries statuses to the parent. Everything is one
JSON line. Knows nothing of what a child does.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NoReturn

import msgspec

from toka_async.config import Config
from toka_async.logs import catch_stray_lines, configure
from toka_async.socket_folder import remove_folder
from toka_async.topology import Topology

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the parent's to decide on; children ignore them
PR_SET_PDEATHSIG = 1  # prctl(2): the signal that a process gets when its parent dies


class BatchJob(msgspec.Struct, frozen=True, kw_only=True):
    """A batch without a server: files, as absolute paths, and the folder where its progress is kept.

    model: what of the configuration the answers depend on, by key.
    """

    input: str
    output: str
    errors: str
    folder: str
    model: dict[str, str] = {}


class ChildSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a child is told at its start."""

    role: Literal["server", "batch", "scheduler", "rank"]  # batch: in the place of the server
    replica: int = 0
    rank: int = 0  # within the replica
    life: int = 0  # of the replica: how often it was restarted
    config: Config
    topology: Topology
    model_dir: str
    tokenizer_dir: str
    served_name: str
    folder: str  # holds the sockets; whoever outlives the parent removes it
    listen_fd: int = -1  # the server's listening socket
    job: BatchJob | None = None

    @property
    def name(self) -> str:
        match self.role:
            case "server" | "batch":
                return self.role
            case "scheduler":
                return f"scheduler-{self.replica}"
            case "rank":
                return f"rank-{self.replica}-{self.rank}"


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank computes on and with, and how much fits; no dtype where nothing is computed."""

    device: str
    dtype: str
    num_tokens: int  # of the cache
    max_context: int
    max_seqs: int
    max_tokens: int


class Started(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Child -> parent: it does its work now. resources: of a rank."""

    resources: Resources | None = None


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """Child -> parent: it ends, and why. `user`: the user can mend it, so no more than this line is needed."""

    message: str
    user: bool = False


class Drained(msgspec.Struct, frozen=True, tag=True):
    """Server -> parent: no request is running; `num_cut` of them did not finish in time."""

    num_cut: int


class Advanced(msgspec.Struct, frozen=True, tag=True):
    """Batch -> parent: how many of the lines have ended by now, and how many of these went to the error file.

    tokens: generated for all of these lines.
    """

    done: int
    failed: int
    total: int
    tokens: int = 0


class Finished(msgspec.Struct, frozen=True, tag=True):
    """Batch -> parent: all lines have ended."""

    completed: int
    failed: int
    prompt_tokens: int = 0
    tokens: int = 0  # generated


class Alive(msgspec.Struct, frozen=True, tag=True):
    """Child -> parent: its answer to a Beat. memory: bytes of its GPU that are in use, kept for more, and all."""

    memory: tuple[int, int, int] | None = None


class Beat(msgspec.Struct, frozen=True, tag=True):
    """Parent -> child: say Alive, if you are."""


class Silent(msgspec.Struct, frozen=True, tag=True):
    """Parent -> server: these children, all of them, have not answered lately."""

    names: tuple[str, ...]


class Memory(msgspec.Struct, frozen=True, tag=True):
    """Parent -> server: what a child has said of its GPU; see `Alive`."""

    name: str
    memory: tuple[int, int, int]


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Parent -> server: accept no more, give running requests `seconds` to finish, say Drained, exit."""

    seconds: float


class Fail(msgspec.Struct, frozen=True, tag=True):
    """Parent -> server: the engine is gone; tell all clients and exit."""

    reason: str


class Lost(msgspec.Struct, frozen=True, tag=True):
    """Parent -> server: a replica is gone, and its requests with it. If it comes back, that is its life `life`."""

    replica: int
    life: int
    reason: str


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Parent -> child: exit now. The pipe's end without it means that the parent was killed."""


Status = Started | Fatal | Drained | Advanced | Finished | Alive
Order = Drain | Fail | Lost | Stop | Beat | Silent | Memory

_ORDERS: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order)


class ParentLink:
    """A child's end of the pipes.

    `on_order` runs in the lifeline's thread; while None, any order ends the child. So does `on_beat`: what it does when
    it is asked whether it is alive.
    """

    def __init__(self, spec: ChildSpec, orders_fd: int, status_fd: int, rest: bytes = b"") -> None:
        self.spec = spec
        self.on_order: Callable[[Order], object] | None = None
        self.on_beat: Callable[[], object] = lambda: self.report(Alive())
        self._orders_fd = orders_fd
        self._status_fd = status_fd
        self._rest = rest
        threading.Thread(target=self._watch, name="lifeline", daemon=True).start()

    def report(self, status: Status) -> None:
        """Tell the parent; a parent that is gone needs no telling."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._status_fd, msgspec.json.encode(status) + b"\n")

    def fatal(self, message: str, *, user: bool = False) -> NoReturn:
        """Report why, in one line, and end."""
        self.report(Fatal(" ".join(message.split()), user))
        self.exit(1)

    def exit(self, code: int = 0) -> NoReturn:
        """End now, with the last lines logged. Nothing else runs: threads of torch and ZeroMQ must not keep it."""
        logging.shutdown()
        os._exit(code)

    def _watch(self) -> None:
        told = False
        try:
            rest = self._rest
            while True:
                *lines, rest = rest.split(b"\n")
                for line in lines:
                    order = _ORDERS.decode(line)
                    if isinstance(order, Beat):
                        self.on_beat()
                        continue
                    if isinstance(order, Stop) or self.on_order is None:
                        told = True
                        return
                    self.on_order(order)
                chunk = os.read(self._orders_fd, 65536)
                if not chunk:
                    return
                rest += chunk
        finally:
            if not told:  # the parent was killed, so this is left to its children
                remove_folder(Path(self.spec.folder))
            self.exit(0)


def connect_parent() -> ParentLink:
    """Read the spec and take over the pipes; to be called first in a child, before any slow import.

    From here on standard input is empty and standard output is standard error, for whatever library prints.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # blocked by the parent until they are ignored
    continue_without_parent()
    orders_fd, status_fd = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    data = b""
    while b"\n" not in data:
        chunk = os.read(orders_fd, 65536)
        if not chunk:
            os._exit(0)  # the parent was gone before it could say anything
        data += chunk
    line, _, rest = data.partition(b"\n")
    spec = msgspec.json.decode(line, type=ChildSpec)
    configure(spec.name, spec.config.log.format)
    catch_stray_lines()
    return ParentLink(spec, orders_fd, status_fd, rest)


def continue_without_parent() -> None:
    """A stopped child whose parent is killed would stay for ever, and keep the address and the folder of files."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)
