"""A machine's agent: joins the leader, opens sockets for ranks, starts them, and carries their lines. Loads no torch.

Ranks end with the agent, whatever ends it, since it holds the other end of their standard input. When the leader is
lost, the agent ends its ranks at once and asks to join again.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import zmq

from toka_async.checkpoint.hub import resolve_model
from toka_async.checkpoint.spec import ModelError
from toka_async.config import Config
from toka_async.config.load import list_settings
from toka_async.logs import configure
from toka_async.nodes.facts import collect_model_facts, collect_versions
from toka_async.nodes.interfaces import NetworkError, find_address, find_interface, find_own_address, resolve_host
from toka_async.nodes.keys import derive_keys
from toka_async.nodes.leading import listen
from toka_async.nodes.links import LAST_WORDS_MS, LeaderLink, LinkRefusedError
from toka_async.nodes.messages import (
    Accepted,
    Bind,
    Bound,
    Checked,
    Dismiss,
    EndRank,
    Join,
    Probe,
    Probed,
    RankGone,
    RankLine,
    RankOrder,
    Refused,
    StartRank,
    ToNode,
)
from toka_async.nodes.placing import NodePlace, make_address, parse_address
from toka_async.nodes.probe import ProbeListener, make_name, probe_all
from toka_async.nodes.secret import VARIABLE, read_secret
from toka_async.procs.child import SIGNALS, ChildSpec, ParentLink, Started
from toka_async.procs.launched import Child, kill_all, make_launch

logger = logging.getLogger(__name__)

ASK_AGAIN = 1.0  # seconds until it asks again where the leader may accept it soon
LOOK_AGAIN = 5.0  # seconds until it looks up the leader's name again while nobody has accepted it
PATIENCE = 5.0  # seconds beyond the leader's own drain


@dataclass(frozen=True, slots=True)
class AgentEnd:
    """Why an agent ends, and its exit code."""

    message: str
    code: int


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """How an agent was started.

    interface: of its network; empty: the one that leads to the leader. secret: see `nodes.secret`. config: what it was
    started with; None: it takes the leader's. on_joined: called when the leader has accepted it.
    """

    place: NodePlace
    interface: str
    join_timeout: float
    insecure: bool
    config: Config | None = None
    on_joined: Callable[[], object] = lambda: None


def run(link: ParentLink) -> None:
    """Run the agent of the leader's machine until the parent ends this process."""
    cluster = link.spec.config.cluster
    place = NodePlace(*parse_address(cluster.address, "cluster.address"), index=0, size=cluster.nodes)
    settings = AgentSettings(
        place, cluster.interface, cluster.join_timeout, cluster.insecure, on_joined=lambda: link.report(Started())
    )
    Agent(settings).run()
    while True:  # the coordinator tells the parent why
        signal.pause()


def run_agent(place: NodePlace, config: Config, interface: str, *, has_settings: bool) -> AgentEnd:
    """Run the agent of a machine that is not the leader's. has_settings: the configuration was given by the user."""
    configure(f"node-{place.index}", config.log.format)
    cluster = config.cluster
    settings = AgentSettings(place, interface, cluster.join_timeout, cluster.insecure, config if has_settings else None)
    return Agent(settings).run()


class Agent:
    """Runs ranks for a leader until it is dismissed, refused, or told to stop by signals. Needs the main thread."""

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        self._facts = collect_versions()
        self._context: zmq.Context[Any] = zmq.Context()
        self._woken, self._wake = os.pipe()

    def run(self) -> AgentEnd:
        """Join and serve, again and again. Signals that are ignored stay ignored; others end it.

        Raises ConfigError: there is no secret, and it is needed.
        """
        os.set_blocking(self._wake, False)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda *_: None)
        try:
            while True:
                deadline = time.monotonic() + self._settings.join_timeout
                network = self._wait_for_network(deadline)
                membership = Membership(self._settings, self._facts, network, self._context)
                try:
                    membership.serve(deadline, self._woken)
                except LeaderLostError as error:
                    logger.error("%s; asking to join again", error)
                finally:
                    membership.close()
        except AgentEndError as error:
            return error.end

    def _wait_for_network(self, deadline: float) -> OwnNetwork:
        """Find the leader and the own address; waits for name servers and networks that come up later."""
        said = ""
        while True:
            try:
                return find_network(self._settings)
            except NetworkError as error:
                check_deadline(self._settings, deadline, str(error))
                if said != (said := str(error)):
                    logger.warning("%s; trying again", said)
                if select.select([self._woken], [], [], ASK_AGAIN)[0]:
                    raise AgentEndError("stopped", 0) from None


@dataclass(frozen=True, slots=True)
class OwnNetwork:
    """leader_host, leader: the leader's address, and the one of its socket. address, interface: of this machine."""

    leader_host: str
    leader: str
    address: str
    interface: str


def find_network(settings: AgentSettings) -> OwnNetwork:
    """Look up the leader's name, and find the own address towards it. Raises NetworkError."""
    place, interface = settings.place, settings.interface
    host = resolve_host(place.host)
    address = find_address(interface) if interface else find_own_address(host, place.port)
    return OwnNetwork(host, make_address(host, place.port), address, interface or find_interface(address))


class Membership:
    """One connection to the leader, and the ranks that it asked for. Raises ConfigError: the secret is missing."""

    def __init__(
        self, settings: AgentSettings, facts: dict[str, str], network: OwnNetwork, context: zmq.Context[Any]
    ) -> None:
        place, config = settings.place, settings.config
        self._settings = settings
        self._network = network
        secret = read_secret(os.environ, network.leader_host, insecure=settings.insecure)
        self._children: dict[str, Child] = {}
        self._opened: dict[tuple[int, int, int], socket.socket] = {}  # by replica, life and rank; rank -1: the group's
        self._config: Config | None = None  # the leader's, once it has joined
        self._model_dir = Path()
        self._leaves_at: float | None = None  # when it ends by a signal, at the latest
        self._asks_at: float | None = None
        self._looks_at = time.monotonic() + LOOK_AGAIN
        self._problem = "nobody answers"
        self._link = LeaderLink(context, network.leader, derive_keys(secret))
        self._probes = ProbeListener(network.address, make_name(network.leader, place.index))
        self._join = Join(
            index=place.index,
            size=place.size,
            address=network.address,
            interface=network.interface,
            probe_port=self._probes.port,
            facts=facts,
            settings=None if config is None else list_settings(config),
        )

    def serve(self, deadline: float, woken: int) -> NoReturn:
        """Ask to join until the deadline, and do what the leader says. Raises AgentEndError or LeaderLostError.

        woken: readable after a signal.
        """
        logger.info("asking the leader at %s to join, as %s", self._network.leader, self._join.describe())
        self._link.send(self._join)
        while True:
            poller = zmq.Poller()  # ranks come and go
            for each in (self._link.socket, self._link.monitor, woken):
                poller.register(each, zmq.POLLIN)
            for child in self._children.values():
                poller.register(child.status_fd, zmq.POLLIN)
            ready = {each for each, _ in poller.poll(self._time_until_due(deadline))}
            if woken in ready:
                os.read(woken, 4096)
                self._note_signal()
            self._take_break()
            for message in self._link.receive():
                self._carry_out(message)
            for child in [child for child in self._children.values() if child.status_fd in ready]:
                self._read(child)
            self._act(deadline)

    def _time_until_due(self, deadline: float) -> int | None:
        """Milliseconds until `_act` has something to do."""
        times = [self._asks_at, self._leaves_at, *([deadline, self._looks_at] if self._config is None else [])]
        waits = [at - time.monotonic() for at in times if at is not None]
        return max(0, int(min(waits) * 1000) + 1) if waits else None

    def _act(self, deadline: float) -> None:
        now = time.monotonic()
        if self._leaves_at is not None and now >= self._leaves_at:
            raise AgentEndError("stopped; the leader did not stop in time", 0)
        if self._asks_at is not None and now >= self._asks_at:
            self._asks_at = None
            self._link.send(self._join)
        if self._config is None:
            check_deadline(self._settings, deadline, self._problem)
            if now >= self._looks_at:
                self._looks_at = now + LOOK_AGAIN
                self._check_network()

    def _check_network(self) -> None:
        """Raise LeaderLostError if the leader's name means another machine now: a lost one may be replaced."""
        with suppress(NetworkError):
            if (network := find_network(self._settings)) != self._network:
                raise LeaderLostError(f"{self._settings.place.host} is {network.leader_host} now")

    def _take_break(self) -> None:
        try:
            if not self._link.take_break():
                return
        except LinkRefusedError:
            raise AgentEndError(
                f"the leader at {self._network.leader} does not accept this node's key: {VARIABLE} must be "
                "the same on all nodes (or something else listens there)",
                2,
            ) from None
        # What the leader said last may tell why.
        for message in self._link.receive():
            if isinstance(message, Dismiss | Refused):
                self._end(message)
        raise LeaderLostError(f"the leader at {self._network.leader} was lost")

    def _end(self, message: Dismiss | Refused) -> None:
        code = message.code if isinstance(message, Dismiss) else 2
        raise AgentEndError(message.reason if isinstance(message, Dismiss) else message.message, code)

    # ---- what the leader says ----------------------------------------------------------------------------------------

    def _carry_out(self, message: ToNode) -> None:
        match message:
            case Accepted():
                self._find_model(message.config)
            case Refused(again=True):
                if message.message != self._problem:
                    logger.warning("%s; asking again", message.message)
                self._problem = message.message
                self._asks_at = time.monotonic() + ASK_AGAIN
            case Refused() | Dismiss():
                self._end(message)
            case Bind():
                self._link.send(self._open(message))
            case Probe():
                problems = tuple(probe_all(message.neighbours, self._network.leader, self._join.describe()))
                self._link.send(Probed(message.replica, message.life, problems))
            case StartRank():
                self._start(message)
            case RankOrder():
                if message.name in self._children:
                    self._children[message.name].write(message.line + b"\n")
            case EndRank():
                if message.name in self._children:
                    self._children[message.name].kill()  # its pipe tells when it has ended

    def _find_model(self, config: Config) -> None:
        """Find the model's files here, which may take a download, and have the leader compare them."""
        self._config, weights = config, config.model.needs_weights
        logger.info("joined the leader at %s", self._network.leader)
        try:
            with dying_of_signals():
                self._model_dir = resolve_model(config.model.path, weights).absolute()
            self._link.send(Checked(collect_model_facts(self._model_dir, with_weights=weights)))
        except (ModelError, OSError) as error:
            self._link.send(Checked({}, problem=str(error)))
            return
        self._settings.on_joined()

    def _open(self, wanted: Bind) -> Bound:
        """Open sockets for ranks, and end what is left of an earlier life."""
        self._end_life(wanted.replica)
        addresses = []
        for rank in wanted.ranks:
            addresses.append(make_address(*self._listen(wanted.replica, wanted.life, rank)))
        group = ""
        if 0 in wanted.ranks:
            group = make_address(*self._listen(wanted.replica, wanted.life, -1))
        return Bound(wanted.replica, wanted.life, tuple(addresses), group)

    def _listen(self, replica: int, life: int, rank: int) -> tuple[str, int]:
        listener = listen(self._network.address)
        self._opened[replica, life, rank] = listener
        return self._network.address, int(listener.getsockname()[1])

    def _start(self, message: StartRank) -> None:
        """Start a rank with the sockets that were opened for it."""
        spec = msgspec.json.decode(message.spec, type=ChildSpec)
        listener = self._opened.pop((spec.replica, spec.life, spec.rank))
        group = self._opened.pop((spec.replica, spec.life, -1)) if spec.rank == 0 else None
        spec = msgspec.structs.replace(
            spec,
            model_dir=str(self._model_dir),
            listen_fd=listener.fileno(),
            group_fd=-1 if group is None else group.fileno(),
            interface=self._network.interface,
        )
        self._children[message.name] = Child(make_launch(spec))
        for each in (listener, group):
            if each is not None:
                each.close()

    def _read(self, child: Child) -> None:
        """Pass on what a rank says, or that it has ended."""
        lines = child.read_lines()
        for line in lines or ():
            self._link.send(RankLine(child.name, line))
        if lines is None:
            del self._children[child.name]
            self._link.send(RankGone(child.name, child.describe_end()))
            kill_all([child])

    # ---- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Kill all ranks and close all sockets."""
        self._end_life()
        self._link.close(LAST_WORDS_MS)
        self._probes.close()

    def _end_life(self, replica: int | None = None) -> None:
        """Kill ranks and close their sockets, of one replica or of all."""
        names = [name for name, child in self._children.items() if replica in (None, child.replica)]
        kill_all(self._children.pop(name) for name in names)
        for key in [key for key in self._opened if replica in (None, key[0])]:
            self._opened.pop(key).close()

    def _note_signal(self) -> None:
        """Stay until the leader has finished its requests: a job's end signals all machines at once."""
        if self._config is None or self._leaves_at is not None:
            raise AgentEndError("stopped", 0)
        timeout = self._config.server.drain_timeout + PATIENCE
        self._leaves_at = time.monotonic() + timeout
        logger.info("stopping with the leader, in %g s at most; a second signal stops at once", timeout)


@contextmanager
def dying_of_signals() -> Iterator[None]:
    """Let signals that are not ignored end the process at once, whatever it does: there are no ranks yet."""
    handlers = {each: signal.getsignal(each) for each in SIGNALS}
    try:
        for number, handler in handlers.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def check_deadline(settings: AgentSettings, deadline: float, problem: str) -> None:
    """Raise AgentEndError after the deadline."""
    if time.monotonic() >= deadline:
        raise AgentEndError(
            f"the leader at {settings.place.leader} did not take this node within {settings.join_timeout:g} s: "
            f"{problem} (cluster.join_timeout)",
            2,
        )


class AgentEndError(Exception):
    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.end = AgentEnd(message, code)


class LeaderLostError(Exception):
    """The connection broke; the leader may come back."""
