"""The server's end of the schedulers: takes requests, and hands what comes back of them to their sinks.

One event loop calls everything here. Every request that is submitted ends exactly once: all samples end, its client
cancels it, the scheduler fails it, or the engine stops. Knows no HTTP and no text.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from time import monotonic

import numpy as np

from toka_async.control import ControlDone
from toka_async.messages import (
    Failed,
    Prefilled,
    Prefills,
    Ready,
    Stats,
    StopChecks,
    Tokens,
    ToScheduler,
    ToServer,
)
from toka_async.server.engine.control import TIMEOUT, EngineControl
from toka_async.server.engine.metrics import Metrics
from toka_async.server.engine.replicas import Replicas
from toka_async.server.engine.request_columns import RequestColumns
from toka_async.server.engine.request_group import EngineStoppedError, RequestFailedError, RequestGroup
from toka_async.server.engine.request_table import RequestTable, Sink
from toka_async.server.limits.jobs import NotServingError, OverloadedError
from toka_async.transport.base import Outbox

MOST = 1 << 20  # requests at once, whatever the configuration says
MOST_SUBMITTED = 256  # requests in a turn of the event loop


class Engine:
    """The replicas' schedulers as the server sees them.

    Args:
        outboxes: to the schedulers, by replica. What they send goes to `on_messages`.
        max_requests: held at once; more raise OverloadedError.
        clock: seconds, monotonic. page_size: tokens of a page of the replicas' caches. control_timeout: seconds, see
            EngineControl.

    Attributes:
        replicas: what each of them can take.
        requests: those that have not ended.
        control: pauses, aborts and updates of the weights.
        on_stop_checks: all are called with each StopChecks message.
        on_busy: all are called when the first request arrives after an idle time.
        on_state: all are called when what the engine can take has changed, or what it reports.
        silent: processes that have not answered their parent lately.
        memory: bytes of each rank's GPU, by its name: in use, kept for more, all.
    """

    def __init__(
        self,
        outboxes: Sequence[Outbox[ToScheduler]],
        max_requests: int,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = monotonic,
        page_size: int = 16,
        control_timeout: float = TIMEOUT,
    ) -> None:
        self.replicas = Replicas(outboxes, page_size)
        self.metrics = metrics or Metrics()
        self.on_stop_checks: list[Callable[[StopChecks], None]] = []
        self.on_busy: list[Callable[[], None]] = []
        self.on_state: list[Callable[[], None]] = []
        self.silent: tuple[str, ...] = ()
        self.memory: dict[str, tuple[int, int, int]] = {}
        self.max_requests = min(max_requests, MOST)
        self.requests = RequestTable(self.replicas, self.metrics, clock, self.max_requests, self._check_idle)
        self.control = EngineControl(self.replicas, self.requests, control_timeout)
        self._clock = clock
        self._num_holders = 0
        self._draining = False
        self._stopped: str | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._busy_seconds = self._busy_since = 0.0
        self.metrics.watch(lambda: self.stats)
        self.metrics.watch_replicas(self.replicas)

    @property
    def ready(self) -> Ready | None:
        """What the ranks allow, once all are up."""
        return self.replicas.ready

    @property
    def stats(self) -> Stats:
        """The schedulers' newest counters, together. They are those of now after `replicas.refresh`."""
        return self.replicas.stats

    @property
    def busy_seconds(self) -> float:
        """Time since the start in which a request was held."""
        return self._busy_seconds + (self._clock() - self._busy_since if self.busy else 0.0)

    @property
    def is_closing(self) -> bool:
        """It will take no requests any more."""
        return self._draining or self._stopped is not None

    @property
    def num_requests(self) -> int:
        """Engine requests (one a prompt) that have not ended."""
        return self.requests.num_requests

    @property
    def num_free(self) -> int:
        """Requests that can be held besides those that are."""
        return self.max_requests - self.num_requests

    @property
    def busy(self) -> bool:
        return not self._idle.is_set()

    def check_serving(self, num_requests: int = 0) -> Ready:
        """Raises NotServingError, or OverloadedError when `num_requests` more cannot be held."""
        if self._stopped is not None:
            raise NotServingError(f"the engine has stopped: {self._stopped}")
        if self._draining:
            raise NotServingError("the server is shutting down")
        if self.ready is None:
            raise NotServingError("the engine is still starting")
        if not self.replicas.live:
            raise NotServingError(f"every replica is being restarted: {next(iter(self.replicas.lost().values()))}")
        if self.num_requests + num_requests > self.max_requests:
            raise OverloadedError(f"{self.num_requests} requests are held; limits.max_requests is {self.max_requests}")
        return self.ready

    def check_whole(self) -> None:
        """Raises NotServingError as `check_serving` does, and when a replica is away or a process silent."""
        self.check_serving()
        for replica, reason in self.replicas.lost().items():
            raise NotServingError(f"replica {replica} is being restarted: {reason}")
        if self.silent:
            raise NotServingError(f"no answer from {', '.join(self.silent)}")

    def begin_drain(self) -> None:
        """From now on new requests raise NotServingError; those held go on."""
        self._draining = True
        self._tell_state()

    async def wait_idle(self) -> None:
        """Waits until no request is held and those who waited for one have let go of it."""
        await self._idle.wait()

    def fail_all(self, reason: str) -> None:
        """The engine is gone: every request held ends with EngineStoppedError, new ones raise NotServingError."""
        self._stopped = reason
        self._tell_state()
        self.requests.fail_all(EngineStoppedError(f"the engine has stopped: {reason}"))

    @asynccontextmanager
    async def running(
        self, requests: RequestColumns, group: RequestGroup, timeout: float = 0.0, waited: float = 0.0
    ) -> AsyncIterator[None]:
        """Submits requests, some of many in a turn of the event loop; leaving with an exception cancels what runs.

        After `timeout` seconds (0: never), of which `waited` have passed, those left fail.

        Raises:
            NotServingError, OverloadedError: none runs.
            RequestFailedError, EngineStoppedError: one has ended before all were submitted; none runs.
        """
        self.check_serving(len(requests))
        since = self._clock() - waited
        self._num_holders += 1
        self._wake()
        try:
            for start in range(0, len(requests), MOST_SUBMITTED):
                part = requests.take(np.arange(start, min(start + MOST_SUBMITTED, len(requests))))
                if start:
                    await asyncio.sleep(0)
                    group.check()
                    self.check_serving(len(part))
                self.requests.submit(part, group, since, timeout)
            yield
        except BaseException:
            self.requests.cancel(group)
            raise
        finally:
            self._num_holders -= 1
            self._check_idle()

    def submit(self, requests: RequestColumns, sink: Sink, timeout: float = 0.0) -> None:
        """Submits requests, all or none; their sink is told what becomes of them.

        Raises:
            NotServingError, OverloadedError: none was submitted.
        """
        self.check_serving(len(requests))
        self._wake()
        self.requests.submit(requests, sink, self._clock(), timeout)

    def _wake(self) -> None:
        if not self.busy:
            self._idle.clear()
            self._busy_since = self._clock()
            for listener in self.on_busy:
                listener()

    def _check_idle(self) -> None:
        if self.busy and not self.num_requests and not self._num_holders:
            self._busy_seconds += self._clock() - self._busy_since
            self._idle.set()

    def _tell_state(self) -> None:
        for listener in self.on_state:
            listener()

    # ---- what the schedulers say -------------------------------------------------------------------------------------

    def on_messages(self, messages: Sequence[ToServer]) -> None:
        """Takes messages, of each scheduler in the order in which they were sent."""
        for message in messages:
            match message:
                case Tokens():
                    self.requests.on_tokens(message)
                case Prefills():
                    self.requests.on_prefills(message)
                case Prefilled():
                    self.requests.on_prefilled(message)
                case StopChecks():
                    for listener in self.on_stop_checks:
                        listener(message)
                case Failed():
                    self.requests.on_failed(message.request_id, RequestFailedError(message.message))
                case Stats():
                    self.replicas.on_stats(message)
                    self._tell_state()
                case Ready():
                    self.replicas.on_ready(message)
                    self._tell_state()
                case ControlDone():
                    self.control.on_done(message)

    def lose(self, replica: int, life: int, reason: str, outbox: Outbox[ToScheduler]) -> None:
        """A replica is gone; `outbox` is to its next life.

        Its requests go to another one, once, from their beginning; those of which a client has seen some end with
        EngineStoppedError. So do all when no other is there.
        """
        self.replicas.lose(replica, life, reason, outbox)
        self.control.lose(replica, reason)
        self.requests.lose(replica, EngineStoppedError(f"replica {replica} has stopped: {reason}"))
        self._tell_state()
