"""What every child process shares: its spec, the pipes to its parent, and how it ends.

Standard input is a child's order channel: the first line is the spec, later lines are orders. Its end without a Stop
means that the parent was killed, so the child exits. On Linux the system kills it before that, even if it is stopped or
busy: see `supervisor.Child`. Standard output carries statuses to the parent. Everything is one JSON line. Knows nothing
of what a child does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable
from typing import Literal, NoReturn

import msgspec

from toka_async.checkpoint.spec import ModelSpec
from toka_async.config import Config
from toka_async.logs import catch_stray_lines, configure
from toka_async.nodes.messages import EndRank, RankGone, RankLine, RankOrder, StartRank
from toka_async.topology import Places, SharedKeys, Topology

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the parent decides on them; children ignore them


class BatchJob(msgspec.Struct, frozen=True, kw_only=True):
    """A batch without a server: absolute paths of its files, and the folder where its progress is kept.

    model: the parts of the configuration on which answers depend, by key.
    """

    input: str
    output: str
    errors: str
    folder: str
    model: dict[str, str] = {}


class ChildSpec(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["server", "batch", "coordinator", "node", "scheduler", "rank"]  # batch: takes the server's place
    replica: int = 0
    rank: int = 0  # within the replica
    life: int = 0  # how often the replica was restarted
    config: Config
    topology: Topology
    places: Places = Places()  # of the replica's life
    model_dir: str
    tokenizer_dir: str
    served_name: str
    shape: ModelSpec  # which the parent has read, as it may take another process
    listen_fd: int = -1  # a socket that listens at the process's address already
    group_fd: int = -1  # a rank's socket that listens where the ranks meet
    interface: str = ""  # a rank's network interface to other machines
    job: BatchJob | None = None
    warm: bool = False  # nothing is served: what a start compiles and measures is left on the disk

    @property
    def name(self) -> str:
        match self.role:
            case "server" | "batch" | "coordinator":
                return self.role
            case "node":
                return "node-0"
            case "scheduler":
                return f"scheduler-{self.replica}"
            case "rank":
                return f"rank-{self.replica}-{self.rank}"


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's device and dtype (empty if nothing is computed), and how much fits."""

    device: str
    dtype: str
    num_tokens: int  # in the cache
    max_context: int
    max_seqs: int
    max_tokens: int


class Started(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Child -> parent: it does its work now. resources: a rank's. direct: address of the server's direct submission."""

    resources: Resources | None = None
    direct: str = ""


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """Child -> parent: it ends, and why. `user`: the user can fix it, so this line is enough."""

    message: str
    user: bool = False


class Drained(msgspec.Struct, frozen=True, tag=True):
    """Server -> parent: no request is running; `num_cut` of them did not finish in time."""

    num_cut: int


class Advanced(msgspec.Struct, frozen=True, tag=True):
    """Batch -> parent: how many lines have ended so far, and how many of these went to the error file.

    tokens: generated for these lines.
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
    """Child -> parent: its answer to a Beat. memory: bytes of its GPU in use, reserved, and in all."""

    memory: tuple[int, int, int] | None = None


class Beat(msgspec.Struct, frozen=True, tag=True):
    """Parent -> child: answer with Alive."""


class Silent(msgspec.Struct, frozen=True, tag=True):
    """Parent -> server: all children that have not answered lately."""

    names: tuple[str, ...]


class Memory(msgspec.Struct, frozen=True, tag=True):
    """Parent -> server: a child's GPU memory; see `Alive`."""

    name: str
    memory: tuple[int, int, int]


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Parent -> server: accept no more requests, give running ones `seconds` to finish, report Drained, exit."""

    seconds: float


class Fail(msgspec.Struct, frozen=True, tag=True):
    """Parent -> server: the engine has failed; tell all clients and exit. The coordinator tells all machines."""

    reason: str


class Lost(msgspec.Struct, frozen=True, tag=True):
    """Parent -> server: a replica and its requests are lost. If it is restarted, it has life `life`."""

    replica: int
    life: int
    reason: str


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Parent -> child: exit now."""


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Parent -> coordinator: prepare a replica's life on all machines, and answer with Prepared."""

    replica: int
    life: int


class Prepared(msgspec.Struct, frozen=True, tag=True):
    """Coordinator -> parent: ranks of the life can be started; see `Places`."""

    replica: int
    life: int
    ranks: tuple[str, ...]
    group: str
    keys: SharedKeys


Status = Started | Fatal | Drained | Advanced | Finished | Alive | Prepared | RankLine | RankGone
Order = Drain | Fail | Lost | Stop | Beat | Silent | Memory | Prepare | StartRank | RankOrder | EndRank

_ORDERS: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order)


class ParentLink:
    """A child's end of the pipes.

    `on_order`, `on_beat` and `on_stop` run in the lifeline's thread. While `on_order` is None, any order ends the
    child; the coordinator's orders wait for `hear`. on_stop: the last thing before an ordered exit.
    """

    def __init__(self, spec: ChildSpec, orders_fd: int, status_fd: int, rest: bytes = b"") -> None:
        self.spec = spec
        self.on_order: Callable[[Order], object] | None = None
        self.on_beat: Callable[[], object] = lambda: self.report(Alive())
        self.on_stop: Callable[[], object] = lambda: None
        self._orders_fd = orders_fd
        self._status_fd = status_fd
        self._rest = rest
        self._can_hear = threading.Event()
        if spec.role != "coordinator":
            self._can_hear.set()
        threading.Thread(target=self._watch, name="lifeline", daemon=True).start()

    def hear(self, on_order: Callable[[Order], object]) -> None:
        """Take orders from now on, those that wait first."""
        self.on_order = on_order
        self._can_hear.set()

    def report(self, status: Status) -> None:
        """Send a status to the parent, if it still exists."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._status_fd, msgspec.json.encode(status) + b"\n")

    def fatal(self, message: str, *, user: bool = False) -> NoReturn:
        self.report(Fatal(" ".join(message.split()), user))
        self.exit(1)

    def exit(self, code: int = 0) -> NoReturn:
        """Flush the log and end at once: threads of torch and ZeroMQ must not keep the process alive."""
        logging.shutdown()
        os._exit(code)

    def _watch(self) -> None:
        try:
            rest = self._rest
            while True:
                *lines, rest = rest.split(b"\n")
                for line in lines:
                    order = _ORDERS.decode(line)
                    self._can_hear.wait()
                    if isinstance(order, Beat):
                        self.on_beat()
                        continue
                    if isinstance(order, Stop) or self.on_order is None:
                        self.on_stop()
                        return
                    self.on_order(order)
                chunk = os.read(self._orders_fd, 65536)
                if not chunk:
                    return
                rest += chunk
        finally:
            self.exit(0)


def connect_parent() -> ParentLink:
    """Read the spec and take over the pipes. A child calls this first, before any slow import.

    Afterwards standard input is empty and standard output is standard error, for whatever libraries print.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # blocked by the parent until they are ignored
    orders_fd, status_fd = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    data = b""
    while b"\n" not in data:
        chunk = os.read(orders_fd, 65536)
        if not chunk:
            os._exit(0)  # the parent ended before it sent the spec
        data += chunk
    line, _, rest = data.partition(b"\n")
    spec = msgspec.json.decode(line, type=ChildSpec)
    configure(spec.name, spec.config.log.format)
    catch_stray_lines()
    return ParentLink(spec, orders_fd, status_fd, rest)
