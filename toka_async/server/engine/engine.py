"""The server's end of the schedulers: numbers requests, sends them, and hands what comes back to those who wait.

One event loop calls everything here. Every request that is submitted ends exactly once: all samples end, its client
cancels it, the scheduler fails it, or the engine stops. Knows no HTTP and no text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic

import msgspec

from toka_async.arrays import as_i32, column
from toka_async.messages import (
    Cancel,
    DropStop,
    EndSample,
    Failed,
    Prefilled,
    Prefills,
    Ready,
    Reason,
    Stats,
    StopChecks,
    StopMask,
    Submit,
    Submits,
    Tokens,
    ToScheduler,
    ToServer,
)
from toka_async.server.engine.direct import FIRST, Direct, Owner
from toka_async.server.engine.direct_rows import DirectJobs
from toka_async.server.engine.inflight import EngineStoppedError, InFlight, RequestFailedError, RequestGroup, timed_out
from toka_async.server.engine.metrics import Metrics
from toka_async.server.engine.replicas import Replicas
from toka_async.server.engine.rows import split, split_requests
from toka_async.server.limits.account import do_nothing
from toka_async.server.limits.jobs import EngineRequest, NotServingError, OverloadedError
from toka_async.transport.base import Outbox


class Engine:
    """The replicas' schedulers as the server sees them.

    Args:
        outboxes: to the schedulers, by replica. What they send goes to `on_messages`.
        max_requests: held at once; more raise OverloadedError.
        clock: seconds, monotonic. page_size: tokens of a page of the replicas' caches.

    Attributes:
        replicas: which of them has what.
        direct: requests that were submitted in columns (`submit_direct`).
        on_stop_checks: called with each StopChecks message.
        on_busy: called when the first request arrives after an idle time.
        on_state: called when what it can take has changed, or what it reports.
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
    ) -> None:
        self.replicas = Replicas(outboxes, page_size)
        self.metrics = metrics or Metrics()
        self.on_stop_checks: Callable[[StopChecks], None] = do_nothing
        self.on_busy: Callable[[], None] = do_nothing
        self.on_state: Callable[[], None] = do_nothing
        self.silent: tuple[str, ...] = ()
        self.memory: dict[str, tuple[int, int, int]] = {}
        self.max_requests = max_requests
        self._clock = clock
        self._inflight: dict[int, InFlight] = {}
        self.direct = Direct(self.replicas, self.metrics, clock, max_requests, self._check_idle)
        self._next_id = 0
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
        return len(self._inflight) + self.direct.num_requests

    @property
    def num_free(self) -> int:
        """Requests of direct submission that can be held besides those that are."""
        return max(0, min(self.max_requests - self.num_requests, self.direct.capacity - self.direct.num_requests))

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
        self.on_state()

    async def wait_idle(self) -> None:
        """Waits until no request is held and those who waited for one have let go of it."""
        await self._idle.wait()

    def fail_all(self, reason: str) -> None:
        """The engine is gone: every request held ends with EngineStoppedError, new ones raise NotServingError."""
        self._stopped = reason
        self.on_state()
        error = EngineStoppedError(f"the engine has stopped: {reason}")
        self.direct.fail_all(error)
        for flight in list(self._inflight.values()):
            self._end(flight, error)

    @contextmanager
    def submitted(
        self, jobs: Sequence[EngineRequest], timeout: float = 0.0, waited: float = 0.0
    ) -> Iterator[RequestGroup]:
        """Submits the jobs, all or none; leaving with an exception (a client gone is one) cancels what still runs.

        After `timeout` seconds (0: never), of which `waited` have passed, that ends with TimedOutError.

        Raises:
            NotServingError, OverloadedError: none was submitted.
        """
        self.check_serving(len(jobs))
        self._num_holders += 1
        self._wake()
        batch = RequestGroup()
        for job in jobs:
            self.submit(job, batch)
        loop = asyncio.get_running_loop() if timeout else None
        timer = None if loop is None else loop.call_later(timeout - waited, self._time_out, batch, timeout)
        try:
            yield batch
        except BaseException:
            for flight in batch.flights:
                self.cancel(flight)
            raise
        finally:
            if timer is not None:
                timer.cancel()
            self._num_holders -= 1
            self._check_idle()

    def submit_direct(self, jobs: DirectJobs, owner: Owner) -> None:
        """Submits the jobs, all or none; the owner is told what becomes of them.

        Raises:
            NotServingError, OverloadedError: none was submitted.
        """
        self.check_serving(len(jobs))
        if len(jobs) > self.num_free:
            raise OverloadedError(f"at most {self.direct.capacity} requests of direct submission can be held")
        self._wake()
        self.direct.submit(jobs, owner)

    def _wake(self) -> None:
        if not self.busy:
            self._idle.clear()
            self._busy_since = self._clock()
            self.on_busy()

    def end_sample(self, flight: InFlight, sample: int, num_tokens: int) -> None:
        """A stop string ended a sample after `num_tokens` tokens: the scheduler is told, once.

        Of a streamed sample later tokens are dropped; of another the scheduler sends `num_tokens`, or a few more.
        """
        if not flight.is_closed(sample) and flight.request_id in self._inflight:
            self.replicas.tell(EndSample(request_id=flight.request_id, sample=sample, num_tokens=num_tokens))
        flight.close(sample)

    def find(self, request_id: int) -> InFlight | None:
        """The request of that number, while it is held."""
        return self._inflight.get(request_id)

    def tell_all(self, message: StopMask | DropStop) -> None:
        """Every replica is told of a stop set."""
        self.replicas.tell_all(message)

    def _new_id(self) -> int:
        request_id, self._next_id = self._next_id, (self._next_id + 1) % FIRST
        return request_id

    def submit(self, job: EngineRequest, batch: RequestGroup) -> None:
        """One more of a batch that is `submitted`."""
        request_id = self._new_id()
        flight = InFlight(batch, request_id, len(job.prompt), job.n, job.stream, self._clock(), job.in_blocks)
        self._inflight[request_id] = flight
        self.replicas.submit(
            Submit(
                request_id=request_id,
                prompt=column(job.prompt),
                n=job.n,
                max_tokens=job.max_tokens,
                seed=job.seed,
                sampling=job.sampling,
                stream=job.stream,
                priority=job.priority,
                stop_id=job.stop_id,
                salt=job.salt,
            )
        )

    def cancel(self, flight: InFlight) -> None:
        """Nobody waits for it any more."""
        if self._drop(flight):
            self.metrics.cancelled()

    def _drop(self, flight: InFlight) -> bool:
        """It is held no more; False when it was not."""
        if self._inflight.pop(flight.request_id, None) is None:
            return False
        self.replicas.tell(Cancel(request_id=flight.request_id))
        self.replicas.end(flight.request_id)
        return True

    def _time_out(self, batch: RequestGroup, seconds: float) -> None:
        for flight in batch.flights:
            if self._drop(flight):
                self._ended(flight, timed_out(seconds))

    # ---- what the schedulers say -------------------------------------------------------------------------------------

    def on_messages(self, messages: Sequence[ToServer]) -> None:
        """Takes messages, of each scheduler in the order in which they were sent."""
        for message in messages:
            match message:
                case Tokens():
                    if rest := self.direct.on_tokens(message):
                        self._on_tokens(rest)
                case Prefilled():
                    self._on_prefilled(message)
                case Prefills():
                    self.direct.on_prefills(message)
                    self._on_prefills(message)
                case StopChecks():
                    self.on_stop_checks(message)
                case Failed():
                    self._on_failed(message)
                case Stats():
                    self.replicas.on_stats(message)
                    self.on_state()
                case Ready():
                    self.replicas.on_ready(message)
                    self.on_state()

    def lose(self, replica: int, life: int, reason: str, outbox: Outbox[ToScheduler]) -> None:
        """A replica is gone; `outbox` is to its next life.

        Its requests go to another one, once, from their beginning; those of which a client has seen some end with
        EngineStoppedError. So do all when no other is there.
        """
        for placement in self.replicas.lose(replica, life, reason, outbox):
            error = EngineStoppedError(f"replica {replica} has stopped: {reason}")
            if isinstance(placement.submit, Submits):
                self.direct.lost(placement, error)
                continue
            flight = self._inflight.pop(placement.key)
            if self.replicas.live and not placement.retried and not (flight.stream and flight.touched):
                submit = msgspec.structs.replace(placement.submit, request_id=self._new_id())
                flight.restart(submit.request_id, submit.n)
                self._inflight[submit.request_id] = flight
                self.replicas.submit(submit, retried=True)
            else:
                self._ended(flight, error)
        self.on_state()

    def _on_tokens(self, message: Tokens) -> None:
        num_rows = len(message.counts) // 4
        if message.num_logprobs <= 0:
            for request_id, block in split_requests(message, self._is_in_blocks):
                flight = self._inflight[request_id]
                num_rows -= block.counts.size
                self.metrics.samples_ended(block.reasons)
                flight.add_block(block)
                self.replicas.settle(request_id, flight.num_open)
                if not flight.num_open:
                    self._end(flight, None)
        if num_rows:
            self._on_rows(message)

    def _is_in_blocks(self, request_id: int) -> bool:
        return (flight := self._inflight.get(request_id)) is not None and flight.in_blocks

    def _is_by_sample(self, request_id: int) -> bool:
        return (flight := self._inflight.get(request_id)) is not None and not flight.in_blocks

    def _on_rows(self, message: Tokens) -> None:
        """The rows of flights that keep them sample by sample; those of flights cancelled meanwhile are passed over."""
        for request_id, sample, rows, reason in split(message, self._is_by_sample):
            flight = self._inflight[request_id]
            flight.add(sample, rows, reason)
            if reason is not Reason.NONE:
                self.metrics.sample_ended(reason)
                self.replicas.settle(request_id, flight.num_open)
            if not flight.num_open:
                self._end(flight, None)

    def _on_prefilled(self, message: Prefilled) -> None:
        if flight := self._inflight.get(message.request_id):
            flight.prefilled = message
            self.metrics.prefilled(flight.num_prompt, self._clock() - flight.submitted)

    def _on_prefills(self, message: Prefills) -> None:
        columns = (as_i32(message.request_ids).tolist(), as_i32(message.cached_tokens).tolist())
        for request_id, cached in zip(*columns, strict=True):
            self._on_prefilled(Prefilled(request_id=request_id, cached_tokens=cached))

    def _on_failed(self, message: Failed) -> None:
        error = RequestFailedError(message.message)
        if flight := self._inflight.get(message.request_id):
            self._end(flight, error)
        else:
            self.direct.on_failed(message.request_id, error)

    def _end(self, flight: InFlight, error: Exception | None) -> None:
        del self._inflight[flight.request_id]
        self.replicas.end(flight.request_id)
        self._ended(flight, error)

    def _ended(self, flight: InFlight, error: Exception | None) -> None:
        """The request is held no more, neither here nor by a replica."""
        if error is None:
            self.metrics.request_ended(self._clock() - flight.submitted)
        else:
            self.metrics.failed()
        flight.end(error)
        self._check_idle()

    def _check_idle(self) -> None:
        if self.busy and not self.num_requests and not self._num_holders:
            self._busy_seconds += self._clock() - self._busy_since
            self._idle.set()
