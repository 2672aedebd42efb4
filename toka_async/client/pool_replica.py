"""A replica of a pool: its connection, which is made anew after failures, later each time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from toka_async.client.connection import ClientConnection, ConnectionOptions, ZmqContext
from toka_async.client.dispatcher import DispatchedReplica, Dispatcher
from toka_async.client.errors import ReplicaLostError
from toka_async.client.pending import Pending
from toka_async.protocol import Welcome
from toka_async.transport.zmq_frames import Loss

PATIENCE = 10.0  # seconds for a connection to be made, or restored after a break
REST = 1.0  # seconds with fewer requests after the server refused one for now
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds after a failure, doubled with each
SILENCE = 5.0  # seconds of a draining replica, from which a sign of life was asked for; then it counts as lost
AHEAD = 1.25  # times the samples that run at once: so that the server always has the next ones


class PoolReplica(DispatchedReplica):
    """Joins the dispatcher while the server may get requests.

    Args:
        max_samples: open at once at the replica. None: 1.25 times those that run there at once.
        on_change: called when it joined, failed, or was drained.

    Attributes:
        problem: why there is no connection.
        is_closed: for good.
    """

    __slots__ = (
        "_connection",
        "_context",
        "_dispatcher",
        "_given",
        "_is_draining",
        "_loop",
        "_most",
        "_on_change",
        "_options",
        "_probe",
        "_timer",
        "is_closed",
        "problem",
    )

    def __init__(
        self,
        url: str,
        context: ZmqContext,
        options: ConnectionOptions,
        dispatcher: Dispatcher,
        max_samples: int | None,
        on_change: Callable[[], None],
    ) -> None:
        super().__init__(url)
        self._context = context
        self._options = options
        self._dispatcher = dispatcher
        self._given = max_samples
        self._most = 1
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._connection: ClientConnection | None = None
        self._timer: asyncio.TimerHandle | None = None  # for the next connection, or the end of a rest or of patience
        self._probe: asyncio.TimerHandle | None = None  # while it drains
        self._is_draining = self.is_closed = False
        self.problem: str | None = None

    def connect(self) -> None:
        self._set_timer(PATIENCE, lambda: self._fail("nobody answers"))
        try:
            self._connection = ClientConnection(
                self._context,
                self.url,
                self._options,
                on_welcome=self._on_welcome,
                on_loss=self._on_loss,
                retries=False,
            )
        except ValueError as error:
            self._fail(str(error))

    def begin(self, attempt: Pending) -> None:
        assert self._connection is not None
        self._connection.add(attempt)

    def abandon(self, attempt: Pending) -> None:
        assert self._connection is not None
        self._connection.abandon([attempt])

    def rest(self, *, is_full: bool) -> None:
        if is_full and self.samples:
            self._dispatcher.resize(self, self.samples)  # one comes when one has ended
            self._set_timer(REST, lambda: self._dispatcher.resize(self, self._most))
        else:
            self._dispatcher.leave(self)
            self._set_timer(REST, self._join)

    def drain(self) -> None:
        """Take no more requests, and close once those that it has are over.

        A replica that leaves the list may be lost, such as one whose host is off, which no packet says. So it is asked
        for signs of life, and its requests begin elsewhere when it gives none.
        """
        self._is_draining = True
        self._dispatcher.leave(self)
        self._ask_for_life()

    def _ask_for_life(self) -> None:
        connection = self._connection
        if self.is_closed or connection is None:
            return
        num_heard = connection.num_heard
        connection.ping()

        def look() -> None:
            if connection.num_heard == num_heard:
                self._fail("it has left the list of replicas, and is silent")
            else:
                self._ask_for_life()

        self._probe = self._loop.call_later(SILENCE, look)

    def note_idle(self) -> None:
        if self._is_draining:
            self.close()
            self._on_change()

    def close(self) -> None:
        self.is_closed = True
        for timer in (self._timer, self._probe):
            if timer is not None:
                timer.cancel()
        if self._connection is not None:
            self._connection.close(says_bye=True)

    def _join(self) -> None:
        if not self.is_joined and not self._is_draining:
            self._dispatcher.join(self)
            self._on_change()

    def _on_welcome(self, welcome: Welcome) -> None:
        self.problem = None
        if self._timer is not None:
            self._timer.cancel()
        self.max_requests = welcome.credit
        self._most = self._given or max(1, math.ceil(AHEAD * welcome.max_seqs))
        self.max_running = min(self._most, welcome.max_seqs)
        self._dispatcher.resize(self, self._most)
        self._join()

    def _on_loss(self, loss: Loss) -> None:
        if loss.problem is not None:
            self._fail(loss.problem)
        elif not self.is_closed:
            self._dispatcher.leave(self)
            self._set_timer(PATIENCE, lambda: self._fail("the connection broke"))

    def _fail(self, problem: str) -> None:
        """Give up the server's session, and try another one after a while."""
        self.problem = problem
        self.num_failures += 1
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        self._set_timer(min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(self.num_failures - 1, 9)), self.connect)
        self._dispatcher.leave(self)
        if connection is not None:
            connection.fail(ReplicaLostError(problem))
        self._on_change()

    def _set_timer(self, seconds: float, call: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self.is_closed:
            self._timer = self._loop.call_later(seconds, call)
