"""Requests of direct submission on their way through the engine: columns over slots, work per message.

Each ends exactly once: its samples end, it fails, or its owner cancels it. Request ids are slots with a generation, so
that rows that are still on their way when a slot is used again are told apart. Knows no clients and no text.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np

from toka_async.arrays import Bool, Float64, Int32, Int64, as_i32, as_i64, column, i32_column
from toka_async.messages import Cancels, Prefills, Submits, Tokens
from toka_async.server.engine.direct_rows import DirectJobs, DirectRows, make_step_rows, parts_of
from toka_async.server.engine.inflight import timed_out
from toka_async.server.engine.metrics import Metrics
from toka_async.server.engine.replicas import Placement, Replicas
from toka_async.server.limits.account import Account, Cost

FIRST = 1 << 30  # of the request ids; other requests have lower ones
MOST = 1 << 20  # at once
TIMER_STEPS = 100  # looks for late requests in the time that one may take, at most


class Owner(Protocol):
    """Who submitted requests, and is told of them by the ids that it gave them; it does not answer at once.

    number: nobody else's. account: what its requests count in.
    """

    number: int
    account: Account

    def on_rows(self, rows: DirectRows, cached: Int32, ended: Int64) -> None:
        """New tokens; prompt tokens found in the cache, of each row's request; the requests that ended with them."""
        ...

    def on_failed(self, client_ids: Int64, error: Exception) -> None:
        """The requests have ended, without (further) tokens."""
        ...


class Direct:
    """All of them.

    Args:
        capacity: requests at once.
        on_empty: called when the last one has ended.
    """

    def __init__(
        self,
        replicas: Replicas,
        metrics: Metrics,
        clock: Callable[[], float],
        capacity: int,
        on_empty: Callable[[], None],
    ) -> None:
        self._replicas = replicas
        self._metrics = metrics
        self._clock = clock
        self._on_empty = on_empty
        self.capacity = min(capacity, MOST)
        self._bits = max(1, (self.capacity - 1).bit_length())
        self._owners: dict[int, Owner] = {}
        self._open_samples: dict[int, int] = {}  # by bundle: requests that were sent to a replica together
        self._free: deque[int] = deque()  # used in turn, so that a slot's generation comes back late
        self._allocated = False
        self._timer: asyncio.TimerHandle | None = None

    def _allocate(self) -> None:
        """The tables, when they are first needed.

        ids: -1 where a slot is free. bundle_keys: the id of the first request of its bundle. places: in the bundle.
        opens: samples that have not ended. tokens: as its account counts them. touched: its owner has seen something.
        """
        size = self.capacity
        self._ids: Int64 = np.full(size, -1, np.int64)
        self._generations: Int64 = np.zeros(size, np.int64)
        self._client_ids: Int64 = np.zeros(size, np.int64)
        self._bundle_keys: Int64 = np.zeros(size, np.int64)
        self._owner_numbers: Int64 = np.zeros(size, np.int64)
        self._places = np.zeros(size, np.int32)
        self._opens = np.zeros(size, np.int32)
        self._cached = np.zeros(size, np.int32)
        self._touched: Bool = np.zeros(size, np.bool_)
        self._num_prompt = np.zeros(size, np.int32)
        self._submitted: Float64 = np.zeros(size)
        self._tokens: Int64 = np.zeros(size, np.int64)
        self._deadlines: Float64 = np.full(size, np.inf)
        self._free.extend(range(size))
        self._allocated = True

    @property
    def num_requests(self) -> int:
        return self.capacity - len(self._free) if self._allocated else 0

    # ---- to the replicas ---------------------------------------------------------------------------------------------

    def submit(self, jobs: DirectJobs, owner: Owner, *, since: Float64 | None = None) -> None:
        """Sends requests, each to the replica that suits it best; there is room for all, and a replica is live.

        since: when each was submitted, of those that are tried again.
        """
        if not self._allocated:
            self._allocate()
        self._owners[owner.number] = owner
        for replica, rows in self._spread(jobs):
            self._send(jobs, rows, owner, replica, None if since is None else since[rows])

    def _spread(self, jobs: DirectJobs) -> list[tuple[int, Int64]]:
        """Which rows go to which replica."""
        everything = np.arange(len(jobs))
        charges = (jobs.lengths + jobs.n * jobs.max_tokens).tolist()
        if len(self._replicas.live) == 1:
            self._replicas.router.charge(self._replicas.live[0], sum(charges))
            return [(self._replicas.live[0], everything)]
        ends = np.cumsum(jobs.lengths)
        prompts = column(jobs.prompts)
        bounds = zip((4 * (ends - jobs.lengths)).tolist(), (4 * ends).tolist(), charges, strict=True)
        place, live = self._replicas.router.place, self._replicas.live
        chosen = np.asarray([place(prompts[start:end], charge, live, jobs.salt) for start, end, charge in bounds])
        return [(replica, np.flatnonzero(chosen == replica)) for replica in np.unique(chosen).tolist()]

    def _send(self, jobs: DirectJobs, rows: Int64, owner: Owner, replica: int, since: Float64 | None) -> None:
        count = rows.size
        slots = np.asarray([self._free.popleft() for _ in range(count)])
        self._generations[slots] = (self._generations[slots] + 1) % (1 << (30 - self._bits))
        ids: Int64 = FIRST | self._generations[slots] << self._bits | slots
        lengths = jobs.lengths[rows]
        self._ids[slots] = ids
        self._client_ids[slots] = jobs.client_ids[rows]
        self._bundle_keys[slots] = ids[0]
        self._owner_numbers[slots] = owner.number
        self._places[slots] = np.arange(count)
        self._opens[slots] = jobs.n
        self._cached[slots] = 0
        self._touched[slots] = False
        self._num_prompt[slots] = lengths
        self._submitted[slots] = self._clock() if since is None else since
        self._tokens[slots] = lengths + np.int64(jobs.n * jobs.max_tokens)
        owner.account.take(Cost(count, int(self._tokens[slots].sum())))
        self._expect(slots, owner.account.timeout)
        self._open_samples[int(ids[0])] = count * jobs.n
        submits = Submits(
            request_ids=i32_column(ids),
            lengths=column(lengths),
            prompts=column(parts_of(jobs.prompts, jobs.lengths, rows)),
            seeds=column(jobs.seeds[rows]),
            n=jobs.n,
            max_tokens=jobs.max_tokens,
            sampling=jobs.sampling,
            stream=jobs.stream,
            priority=jobs.priority,
            salt=jobs.salt,
        )
        self._replicas.send_bundle(int(ids[0]), submits, replica, retried=since is not None)

    def cancel(self, owner: Owner, client_ids: Int64) -> Int64:
        """Ends those of an owner's requests that have not ended; returns which, by the owner's ids."""
        if not self._allocated:
            return client_ids[:0]
        slots = np.flatnonzero((self._ids >= 0) & (self._owner_numbers == owner.number))
        slots = slots[np.isin(self._client_ids[slots], client_ids)]
        return self._cancel(slots)

    def leave(self, owner: Owner) -> None:
        """The owner is gone, and with it all of its requests."""
        if owner.number in self._owners:
            self._cancel(np.flatnonzero((self._ids >= 0) & (self._owner_numbers == owner.number)))
            del self._owners[owner.number]

    def _cancel(self, slots: Int64) -> Int64:
        self._tell_cancelled(slots)
        self._settle(np.repeat(slots, self._opens[slots]))
        self._metrics.cancelled(slots.size)
        self._release(slots)
        self._check_empty()
        return self._client_ids[slots]

    def _tell_cancelled(self, slots: Int64) -> None:
        of_bundle = self._bundle_keys[slots]
        for key in np.unique(of_bundle).tolist():
            ids = self._ids[slots[of_bundle == key]]
            self._replicas.tell_bundle(key, Cancels(request_ids=i32_column(ids)))

    # ---- deadlines ---------------------------------------------------------------------------------------------------

    def _expect(self, slots: Int64, timeout: float) -> None:
        """They end so many seconds after their submission at the latest; 0: whenever they do."""
        self._deadlines[slots] = self._submitted[slots] + timeout if timeout else np.inf
        if timeout and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(timeout, self._time_out, timeout)

    def _time_out(self, timeout: float) -> None:
        self._timer = None
        held = np.flatnonzero(self._ids >= 0)
        late = held[self._deadlines[held] <= self._clock()]
        if late.size:
            self._tell_cancelled(late)
            self._fail(late, timed_out(timeout))
            self._check_empty()
        left = float(np.min(self._deadlines[self._ids >= 0], initial=np.inf)) - self._clock()
        if left < np.inf:
            wait = max(left, timeout / TIMER_STEPS)
            self._timer = asyncio.get_running_loop().call_later(wait, self._time_out, timeout)

    # ---- from the replicas -------------------------------------------------------------------------------------------

    def on_tokens(self, message: Tokens) -> Tokens | None:
        """Takes the rows that are of direct requests; what is left."""
        if not self._allocated:
            return message
        rows = make_step_rows(message)
        direct: Bool = rows.keys >= FIRST
        if not direct.any():
            return message
        self._on_rows(rows.chosen(self._known(rows.keys)))
        return None if direct.all() else rows.chosen(~direct).message()

    def _on_rows(self, rows: DirectRows) -> None:
        if not rows.keys.size:  # all were cancelled meanwhile
            return
        slots, ends = self._slots(rows.keys), rows.reasons != 0
        self._touched[slots] = True
        self._metrics.samples_ended(rows.reasons)
        np.subtract.at(self._opens, slots[ends], 1)
        ended = np.unique(slots[ends & (self._opens[slots] == 0)])
        self._settle(slots[ends])
        for owner, mine in self._by_owner(slots):
            of_owner = ended if mine.all() else ended[self._owner_numbers[ended] == owner.number]
            part = replace(rows.chosen(mine), keys=self._client_ids[slots[mine]])
            owner.on_rows(part, self._cached[slots[mine]], self._client_ids[of_owner])
        self._metrics.requests_ended(self._clock() - self._submitted[ended])
        self._release(ended)
        self._check_empty()

    def on_prefills(self, message: Prefills) -> None:
        """Prompts are computed; those of other requests are passed over."""
        ids = as_i32(message.request_ids).astype(np.int64)
        known = self._known(ids)
        slots = self._slots(ids[known])
        if slots.size:
            self._cached[slots] = as_i32(message.cached_tokens)[known]
            self._metrics.prefills(int(self._num_prompt[slots].sum()), self._clock() - self._submitted[slots])

    def on_failed(self, request_id: int, error: Exception) -> None:
        """The scheduler refuses one."""
        ids = np.asarray([request_id])
        if self._known(ids).all():
            self._fail(self._slots(ids), error)
            self._check_empty()

    def fail_all(self, error: Exception) -> None:
        """The engine is gone."""
        if self._allocated:
            self._fail(np.flatnonzero(self._ids >= 0), error)
            self._check_empty()

    def lost(self, placement: Placement, error: Exception) -> None:
        """The replica of a bundle is gone: what nobody has seen anything of goes to another one, once."""
        assert isinstance(placement.submit, Submits)
        slots = np.flatnonzero((self._ids >= 0) & (self._bundle_keys == placement.key))
        again = slots[~self._touched[slots]] if self._replicas.live and not placement.retried else slots[:0]
        again = again[np.argsort(self._places[again])]
        jobs = again_of(placement.submit, self._client_ids[again], self._places[again])
        since = self._submitted[again]
        owners = [owner for owner, _ in self._by_owner(slots[:1])]
        self._fail(np.setdiff1d(slots, again), error, settled=True)
        self._release(again)
        del self._open_samples[placement.key]
        for owner in owners if again.size else ():
            self.submit(jobs, owner, since=since)
        self._check_empty()

    def check(self) -> None:
        """For tests: the open samples of bundles are those of their requests."""
        held = np.flatnonzero(self._ids >= 0) if self._allocated else np.empty(0, np.int64)
        keys, places = np.unique(self._bundle_keys[held], return_inverse=True) if held.size else (held, held)
        counts = np.bincount(places, self._opens[held]).astype(np.int64) if held.size else held
        assert self._open_samples == dict(zip(keys.tolist(), counts.tolist(), strict=True))

    # ---- slots -------------------------------------------------------------------------------------------------------

    def _slots(self, ids: Int64) -> Int64:
        return ids & ((1 << self._bits) - 1)

    def _known(self, ids: Int64) -> Bool:
        """Which of any request ids are those of direct requests that have not ended."""
        if not self._allocated:
            return np.zeros(ids.size, np.bool_)
        slots = np.minimum(self._slots(ids), self.capacity - 1)
        known: Bool = self._ids[slots] == ids
        return known

    def _by_owner(self, slots: Int64) -> list[tuple[Owner, Bool]]:
        """The owners of the slots' requests, and which are whose."""
        numbers = self._owner_numbers[slots]
        return [(self._owners[number], numbers == number) for number in np.unique(numbers).tolist()]

    def _fail(self, slots: Int64, error: Exception, *, settled: bool = False) -> None:
        """They end with an error. settled: their replica has nothing to do with them any more."""
        if not settled:
            self._settle(np.repeat(slots, self._opens[slots]))
        for owner, mine in self._by_owner(slots):
            owner.on_failed(self._client_ids[slots[mine]], error)
        self._metrics.failed(slots.size)
        self._release(slots)

    def _settle(self, slots: Int64) -> None:
        """A sample of each slot (with repeats) has ended: a bundle without open ones is over."""
        for key, count in zip(*np.unique(self._bundle_keys[slots], return_counts=True), strict=True):
            self._open_samples[int(key)] -= int(count)
            left = self._open_samples[int(key)]
            self._replicas.settle(int(key), left)
            if not left:
                del self._open_samples[int(key)]
                self._replicas.end(int(key))

    def _release(self, slots: Int64) -> None:
        """Their requests are over."""
        for owner, mine in self._by_owner(slots):
            owner.account.give_back(Cost(int(mine.sum()), int(self._tokens[slots[mine]].sum())))
        self._ids[slots] = -1
        self._free.extend(slots.tolist())

    def _check_empty(self) -> None:
        if not self.num_requests:
            self._on_empty()


def again_of(submits: Submits, client_ids: Int64, places: Int32) -> DirectJobs:
    """Some of the requests of a bundle: `places` ascend."""
    lengths = as_i32(submits.lengths)
    return DirectJobs(
        client_ids=client_ids,
        lengths=lengths[places],
        prompts=parts_of(as_i32(submits.prompts), lengths, places),
        seeds=as_i64(submits.seeds)[places],
        n=submits.n,
        max_tokens=submits.max_tokens,
        sampling=submits.sampling,
        stream=submits.stream,
        priority=submits.priority,
        salt=submits.salt,
    )
