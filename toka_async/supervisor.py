"""The parent's side of the child processes: starting, waiting, restarting, draining, stopping. No child outlives it.

With several replicas, the death of a replica's child ends that replica only, which is then restarted. A child that does
not answer is killed. Waits on the children's status pipes and on signals, without polling. Knows the statuses of
children (`procs.child`) and nothing of what they do.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Self

from toka_async.bar import format_count
from toka_async.heartbeats import Heartbeats
from toka_async.logs import Say, say
from toka_async.nodes.messages import RankGone, RankLine
from toka_async.procs.child import (
    SIGNALS,
    Alive,
    Beat,
    Drain,
    Drained,
    Fail,
    Fatal,
    Lost,
    Memory,
    Silent,
    Started,
    Status,
)
from toka_async.procs.launched import STATUSES, STOP_TIMEOUT, Child, Launch, RemoteChild, kill_all
from toka_async.restarts import Restarts

ECHO = 1.0  # seconds within which a second signal is the same one, sent to the parent and to its group
FAIL_TIMEOUT = 2.0  # seconds for the server to tell its clients of the failure
START_PATIENCE = 10  # factor of the timeout for a child of a restarted replica: it loads and compiles


class ChildError(Exception):
    """A child ended, or is about to, without an order. `user`: the message is all that the user needs."""

    def __init__(self, message: str, child: Child | RemoteChild, *, user: bool = False) -> None:
        super().__init__(message)
        self.child = child
        self.user = user


class Supervisor:
    """Runs the children to their end. A context manager: leaving it stops every child, in the order of adding.

    The first child added is the server: it drains, and tells clients of a failure.

    Args:
        drain_timeout: seconds that running requests get.
        relaunch: makes the children of a replica from its number and life. Without it, any death ends all.
        on_status: called with children's statuses; a number that it returns ends all, as the exit code.
        hang_timeout: seconds without a sign of life after which a child is dead, once all have started; 0: never.
        say: writes a line for people, without waiting for them.
    """

    def __init__(
        self,
        drain_timeout: float,
        relaunch: Callable[[int, int], Iterable[Launch]] | None = None,
        on_status: Callable[[Status], int | None] = lambda _status: None,
        hang_timeout: float = 0.0,
        say: Say = say,
    ) -> None:
        self._drain_timeout = drain_timeout
        self._relaunch = relaunch
        self._on_status = on_status
        self._code: int | None = None
        self._restarts = Restarts(time.monotonic)
        self._say = say
        self._hang_timeout = hang_timeout
        self._beats = Heartbeats(hang_timeout, time.monotonic)
        self._silent: tuple[str, ...] = ()
        self._children: list[Child | RemoteChild] = []
        self._heard: deque[tuple[Child | RemoteChild | None, Status | None]] = deque()
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()

    def __enter__(self) -> Self:
        for fd in (self._wake_read, self._wake_write):
            os.set_blocking(fd, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._old_wakeup = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        self._old_handlers = {number: signal.signal(number, _ignore) for number in SIGNALS if _is_wanted(number)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for child in self._children:
            child.stop()
        signal.set_wakeup_fd(self._old_wakeup)
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def start_remote(self, launch: Launch, via: Child) -> None:
        """Start a rank on another machine, through the coordinator."""
        self._children.append(RemoteChild(launch, via))

    def start(self, launch: Launch) -> Child:
        child = Child(launch)
        self._children.append(child)
        self._selector.register(child.status_fd, selectors.EVENT_READ, child)
        return child

    def run(self, on_started: Callable[[], None]) -> int:
        """Wait for every child's Started, call `on_started`, then serve until a signal or a failure.

        Returns:
            The exit code: 0 after an orderly stop, 2 for a user's error during the start, 1 for anything else.
        """
        started = False
        try:
            if not self._wait_started():
                return 0
            started = True
            on_started()
            self._wait_signal()
            return self._drain() if self._code is None else self._code
        except ChildError as failure:
            self._say(str(failure), logging.ERROR)
            self._fail(str(failure))
            return 2 if failure.user and not (started and failure.child.replica >= 0) else 1

    def _wait_started(self) -> bool:
        """Wait for all children, also for those that are added meanwhile; False if a signal came first."""
        while not all(child.started for child in self._children):
            for child, status in self._wait_events():
                if child is None:
                    self._say("stopped before it was ready")
                    return False
                if isinstance(status, Started):
                    child.started = True
        return True

    def _wait_signal(self) -> None:
        """Wait for a signal, or a status that ends all; restarts lost replicas meanwhile."""
        while self._code is None:
            for replica in self._restarts.take_due():
                assert self._relaunch is not None
                for launch in self._relaunch(replica, self._restarts.life(replica)):
                    self.start(launch)
            waits = (self._restarts.time_until_due(), self._beats.time_until_due())
            timeout = min((wait for wait in waits if wait is not None), default=None)
            if any(child is None for child, _ in self._handle_events(timeout)):
                return
            self._ask_all()

    def _ask_all(self) -> None:
        """Send heartbeats if they are due, declare children dead that hang, and tell the server of silent ones."""
        if not self._beats.take_due():
            return
        for child in [*self._children]:
            if child not in self._children:
                continue  # lost with another of its replica
            patience = 1 if child.started else START_PATIENCE
            if self._beats.hangs(child.name, patience):
                failure = ChildError(f"{child.name} has not answered for {patience * self._hang_timeout:g} s", child)
                if not self._handle_death(failure):
                    raise failure
            else:
                self._beats.note_asked(child.name)
                child.order(Beat())
        self._tell_silent()

    def _tell_silent(self) -> None:
        started = {child.name for child in self._children if child.started}
        if (silent := tuple(name for name in self._beats.find_silent() if name in started)) != self._silent:
            self._silent = silent
            self._children[0].order(Silent(silent))

    def _handle_death(self, failure: ChildError) -> bool:
        """Handle the death of a replica's child; False if it ends everything."""
        if self._relaunch is None or failure.child.replica < 0:
            return False
        self._lose(failure.child.replica, str(failure))
        return True

    def _handle_events(self, timeout: float | None) -> Iterator[tuple[Child | RemoteChild | None, Status | None]]:
        """Like `_wait_events`, but handles statuses of the supervisor, and deaths that it survives."""
        try:
            for child, status in self._wait_events(timeout):
                if child is not None and isinstance(status, Started):
                    self._note_started(child)
                elif child is not None and isinstance(status, Alive):
                    self._beats.note_answered(child.name)
                    self._tell_silent()
                    if status.memory is not None:
                        self._children[0].order(Memory(child.name, status.memory))
                yield child, status
        except ChildError as failure:
            if not self._handle_death(failure):
                raise

    def _note_started(self, child: Child | RemoteChild) -> None:
        child.started = True
        self._beats.note_answered(child.name)
        if all(each.started for each in self._children if each.replica == child.replica):
            self._restarts.note_success(child.replica)
            self._say(f"replica {child.replica} is back")

    def _lose(self, replica: int, reason: str) -> None:
        """Kill the rest of the replica, let the server end its requests, and schedule a restart."""
        lost = [child for child in self._children if child.replica == replica]
        for child in lost:
            if isinstance(child, Child):
                self._selector.unregister(child.status_fd)
            self._children.remove(child)
            self._beats.forget(child.name)
        kill_all(lost)
        delay = self._restarts.note_lost(replica)
        self._say(f"{reason}; replica {replica} is restarted in {delay:g} s", logging.ERROR)
        self._children[0].order(Lost(replica, self._restarts.life(replica), reason))

    def _drain(self) -> int:
        signalled = time.monotonic()
        deadline = signalled + self._drain_timeout + STOP_TIMEOUT
        self._say(f"finishing running requests, for {self._drain_timeout:g} s at most; a second signal stops at once")
        self._server.order(Drain(self._drain_timeout))
        while (now := time.monotonic()) < deadline:
            for child, status in self._handle_events(deadline - now):
                if isinstance(status, Drained):
                    self._say(
                        "stopped"
                        + (f"; {format_count(status.num_cut, 'request')} did not finish" if status.num_cut else "")
                    )
                    return 0
                if child is None and time.monotonic() - signalled > ECHO:
                    self._say("stopped at once, by a second signal", logging.WARNING)
                    return 1
        self._say("stopped; the server did not finish in time", logging.WARNING)
        return 1

    def _fail(self, reason: str) -> None:
        """Give the server time to tell its clients, if it lives."""
        for child in self._children:
            if child.replica < 0:
                child.order(Fail(reason))
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._server.process.wait(FAIL_TIMEOUT)

    @property
    def _server(self) -> Child:
        server = self._children[0]
        assert isinstance(server, Child)
        return server

    def _wait_events(self, timeout: float | None = None) -> Iterator[tuple[Child | RemoteChild | None, Status | None]]:
        """Wait for events: (child, status), or (None, None) for a signal. What is not taken comes at the next call.

        Raises:
            ChildError: a child has ended or reports that it will.
        """
        if not self._heard:
            for key, _ in self._selector.select(timeout):
                self._hear(key.data)
        while self._heard:
            child, status = self._heard.popleft()
            if child is None:
                yield None, None
            elif child in self._children:
                yield from self._read_status(child, status)

    def _hear(self, child: Child | None) -> None:
        """Read what a child, or a signal (None), has written."""
        if child is None:
            os.read(self._wake_read, 4096)
            self._heard.append((None, None))
            return
        lines = child.read_lines()
        self._heard.extend([(child, None)] if lines is None else [(child, STATUSES.decode(line)) for line in lines])

    def _read_status(
        self, child: Child | RemoteChild, status: Status | None
    ) -> Iterator[tuple[Child | RemoteChild, Status]]:
        """Yield the status with the child that it is of. Raises ChildError; status None: the child has ended."""
        if status is None:
            assert isinstance(child, Child)
            raise ChildError(child.describe_end(), child)
        if isinstance(status, RankLine | RankGone):
            rank = next((each for each in self._children if each.name == status.name), None)
            if rank is None:
                return  # its replica was lost meanwhile
            if isinstance(status, RankGone):
                raise ChildError(status.message, rank)
            child, status = rank, STATUSES.decode(status.line)
        if isinstance(status, Fatal):
            message = status.message if status.user else f"{child.name}: {status.message}"
            raise ChildError(message, child, user=status.user)
        if self._code is None:
            self._code = self._on_status(status)
        yield child, status


def _is_wanted(number: int) -> bool:
    """`nohup` ignores SIGHUP: the server is meant to outlive its terminal."""
    return number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN


def _ignore(_number: int, _frame: object) -> None:
    """Do nothing: the signal wakes the selector through the wakeup descriptor."""
