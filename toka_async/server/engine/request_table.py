"""All requests that run, whoever submitted them: columns over slots, work per message.

Each request ends exactly once: its samples end, it fails, or its sink cancels it. Request ids are slots with a
generation, so that rows that are still on their way when a slot is used again are told apart. Knows no clients and no
text.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from toka_async.arrays import Bool, Float64, Int32, Int64, as_i32, column, i32_column
from toka_async.messages import Cancels, EndSample, Prefilled, Prefills, Submits, Tokens
from toka_async.server.engine.metrics import Metrics
from toka_async.server.engine.replicas import Replicas
from toka_async.server.engine.request_columns import RequestColumns
from toka_async.server.engine.request_group import timed_out
from toka_async.server.engine.token_block import Score, TokenBlock, read_rows, read_versions
from toka_async.server.engine.weight_versions import WeightVersions
from toka_async.server.limits.account import Account, Cost

FREE = -1  # the id of a slot without a request
MOST_ID = (1 << 31) - 1
LOOKS_APART = 0.05  # seconds between two looks for late requests, at least
EARLY = 0.002  # seconds by which a timer may be early


class Sink(Protocol):
    """Who submitted requests, and is told of them by the keys that it gave them; it does not answer at once.

    account: what its requests count in while they run; None: the caller counts them.
    """

    @property
    def account(self) -> Account | None: ...

    def on_tokens(self, block: TokenBlock, /) -> None:
        """New tokens, ends of samples and of requests."""
        ...

    @property
    def takes_offers(self) -> bool:
        """Whether `offer` may return True now."""
        ...

    def offer(self, token_ids: list[int], scores: list[Score], /) -> bool:
        """Takes new tokens of a sample that goes on, if no other of the sink has any. False: `on_tokens` gets them.

        scores: of each token; none where no log-probs were asked for.
        """
        ...

    def on_prompt(self, key: int, prefilled: Prefilled, /) -> None:
        """The log-probs of a prompt, before its first tokens, where they were asked for."""
        ...

    def on_failed(self, keys: Int64, error: Exception, /) -> None:
        """The requests have ended, without (further) tokens."""
        ...

    def forget(self, keys: Int64, /) -> bool:
        """Drops the tokens that have come of the requests, since they run again; False if a client has seen them."""
        ...


class RequestTable:
    """The requests of one engine.

    Args:
        capacity: requests at once.
        on_empty: called when the last one has ended.

    Attributes:
        num_accounted: requests that count in their sink's account.
        versions: of the weights that generated tokens.
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
        self._capacity = capacity
        size = 1 << max(1, (capacity - 1).bit_length())
        self._mask = size - 1
        self._free = deque(range(capacity))  # the next ids of free slots, used in turn, so that an id comes back late
        self._timer: asyncio.TimerHandle | None = None
        self._next_look = np.inf
        self.num_accounted = 0
        self.versions = WeightVersions()
        self._ids: Int32 = np.full(size, FREE, np.int32)
        self._sinks: npt.NDArray[np.object_] = np.full(size, None, np.object_)
        self._sink_ids: Int64 = np.zeros(size, np.int64)  # id() of the sink, 0 where a slot is free
        self._keys: Int64 = np.zeros(size, np.int64)
        self._columns: npt.NDArray[np.object_] = np.full(size, None, np.object_)  # of which the request is a row
        self._rows: Int32 = np.zeros(size, np.int32)
        self._replica: Int32 = np.zeros(size, np.int32)
        self._is_retry: Bool = np.zeros(size, np.bool_)
        self._num_open: Int32 = np.zeros(size, np.int32)  # samples that have not ended
        self._num_prompt: Int32 = np.zeros(size, np.int32)
        self._max_tokens: Int64 = np.zeros(size, np.int64)
        self._num_tokens: Int64 = np.zeros(size, np.int64)  # that the request may have, prompt and all samples
        self._charged: Int64 = np.zeros(size, np.int64)  # of these: for which its replica counts as busy
        self._cached: Int32 = np.zeros(size, np.int32)
        self._has_tokens: Bool = np.zeros(size, np.bool_)  # its sink was told of some
        self._submitted: Float64 = np.zeros(size)
        self._deadlines: Float64 = np.full(size, np.inf)

    @property
    def num_requests(self) -> int:
        return self._capacity - len(self._free)

    # ---- to the replicas ---------------------------------------------------------------------------------------------

    def submit(self, requests: RequestColumns, sink: Sink, since: float, timeout: float = 0.0) -> None:
        """Sends requests, each to the replica that suits it best; there is room for all, and a replica is live.

        since: when they arrived, by the table's clock; `timeout` seconds later (0: never) those left fail.
        """
        deadline = since + timeout if timeout else np.inf
        for slots, _ in self._place(requests, sink):
            self._submitted[slots] = since
            if timeout:
                self._deadlines[slots] = deadline
        self._expect(deadline)

    def _place(self, requests: RequestColumns, sink: Sink) -> Iterator[tuple[Int64 | slice, Int64]]:
        """Sends requests, each to the replica that suits it best; yields their slots, and which of them these are."""
        num_tokens = requests.num_tokens
        for replica, rows in self._replicas.place(requests, num_tokens):
            ids = [self._free.popleft() for _ in range(rows.size)]
            slot = ids[0] & self._mask
            at = slice(slot, slot + 1) if len(ids) == 1 else np.asarray(ids) & self._mask  # a slice is faster
            self._num_tokens[at] = self._charged[at] = num_tokens[rows]
            self._send(ids, at, requests.take(rows), sink, replica)
            yield at, rows

    def _send(self, ids: list[int], slots: Int64 | slice, requests: RequestColumns, sink: Sink, replica: int) -> None:
        """Fills in the slots and sends their requests to a replica that was charged for them."""
        self._ids[slots] = ids
        self._sinks[slots] = sink
        self._sink_ids[slots] = id(sink)
        self._keys[slots] = requests.keys
        self._columns[slots] = requests
        self._rows[slots] = np.arange(len(requests))
        self._replica[slots] = replica
        self._num_open[slots] = requests.n
        self._num_prompt[slots] = requests.lengths
        self._max_tokens[slots] = requests.max_tokens
        if sink.account is not None:
            sink.account.take(Cost(len(requests), int(self._num_tokens[slots].sum())))
            self.num_accounted += len(requests)
        self._replicas.send(
            replica,
            Submits(
                request_ids=i32_column(ids),
                lengths=column(requests.lengths),
                prompts=column(requests.prompts),
                seeds=column(requests.seeds),
                max_tokens=i32_column(requests.max_tokens),
                n=requests.n,
                sampling=requests.sampling,
                stream=requests.stream,
                priority=requests.priority,
                stop_id=requests.stop_id,
                salt=requests.salt,
            ),
        )

    def cancel(self, sink: Sink, keys: Int64 | None = None) -> Int64:
        """Ends those of a sink's requests (or of some of them) that have not ended; returns their keys."""
        slots = np.flatnonzero(self._sink_ids == id(sink))
        if keys is not None:
            slots = slots[np.isin(self._keys[slots], keys)]
        cancelled = self._keys[slots]
        self._tell_cancelled(slots)
        self._metrics.cancelled(slots.size)
        self._release(slots)
        return cancelled

    def _tell_cancelled(self, slots: Int64) -> None:
        for replica in np.unique(self._replica[slots]).tolist():
            ids = self._ids[slots[self._replica[slots] == replica]]
            self._replicas.send(replica, Cancels(request_ids=i32_column(ids)))

    def end_sample(self, request_id: int, sample: int, num_tokens: int) -> None:
        """A stop string ended a sample after `num_tokens` tokens: the scheduler is told, if the request still runs.

        Of a streamed request tokens that are on their way still come; of another come `num_tokens`, or a few more.
        """
        if self.find(request_id) is not None:
            replica = int(self._replica[self._slot(request_id)])
            self._replicas.send(replica, EndSample(request_id=request_id, sample=sample, num_tokens=num_tokens))

    def find(self, request_id: int) -> tuple[Sink, int] | None:
        """The sink of a request that has not ended, and its key there."""
        slot = self._slot(request_id)
        return None if self._ids[slot] != request_id else (self._sinks[slot], int(self._keys[slot]))

    def list_ids(self, sink: Sink, key: int | None = None) -> list[tuple[int, int]]:
        """The replica and the engine's id of each of a sink's requests that have not ended, or of the one of a key."""
        slots = np.flatnonzero(self._sink_ids == id(sink))
        slots = slots if key is None else slots[self._keys[slots] == key]
        return [*zip(self._replica[slots].tolist(), self._ids[slots].tolist(), strict=True)]

    # ---- deadlines ---------------------------------------------------------------------------------------------------

    def _expect(self, deadline: float) -> None:
        """Looks for late requests at the deadline, or before."""
        if deadline < self._next_look:
            if self._timer is not None:
                self._timer.cancel()
            self._next_look = deadline
            self._timer = asyncio.get_running_loop().call_later(deadline - self._clock(), self.end_late)

    def end_late(self) -> None:
        """Requests whose deadline has passed fail."""
        now = self._clock() + EARLY
        self._timer, self._next_look = None, np.inf
        late = np.flatnonzero(self._deadlines <= now)
        if late.size:
            self._tell_cancelled(late)
            self._fail(late, timed_out(float(self._deadlines[late[0]] - self._submitted[late[0]])))
        self._expect(max(float(self._deadlines.min()), now + LOOKS_APART))

    # ---- from the replicas -------------------------------------------------------------------------------------------

    def on_tokens(self, message: Tokens) -> None:
        """Takes a message's rows; those of requests that have ended meanwhile are passed over."""
        ids, reasons = as_i32(message.request_ids), as_i32(message.reasons)
        slots = self._slots(ids)
        is_known = self._ids[slots] == ids
        has_ended = is_known & (reasons != 0)
        over = self._end_samples(slots[has_ended]) if has_ended.any() else slots[:0]
        rows: Int64 = np.empty((8, ids.size), np.int64)
        rows[0] = self._keys[slots]
        rows[1] = as_i32(message.samples)
        rows[2] = as_i32(message.counts)
        rows[3] = reasons
        rows[4] = ids
        rows[5] = self._cached[slots]
        rows[6] = has_ended & (self._num_open[slots] == 0)
        numbers = self.versions.number_all(message.versions)
        rows[7] = numbers[0]
        tokens = read_rows(message)
        if message.spans:
            tokens = replace(tokens, versions=read_versions(message, numbers))
        block = TokenBlock(rows, tokens, message.num_logprobs)
        if not is_known.all():
            known = np.flatnonzero(is_known)
            slots, block = slots[known], block.take(known)
        self._has_tokens[slots] = True
        self._metrics.samples_ended(block.reasons)
        if slots.size:
            self._give_out(slots, block)
        if over.size:
            self._metrics.requests_ended(self._clock() - self._submitted[over])
            self._release(over)

    def _give_out(self, slots: Int64, block: TokenBlock) -> None:
        """Gives each sink its part of the block; a sink's rows stay in their order."""
        sink_ids, firsts = self._sink_ids[slots], np.zeros(1, np.intp)
        if (sink_ids != sink_ids[0]).any():
            order = np.argsort(sink_ids, kind="stable")
            slots, block, sink_ids = slots[order], block.take(order), sink_ids[order]
            firsts = np.flatnonzero(np.diff(sink_ids, prepend=0))
        sinks = self._sinks[slots[firsts]].tolist()
        starts = [*firsts.tolist(), slots.size]
        ends = np.concatenate([[0], np.cumsum(block.counts)])[starts].tolist()
        # Columns of a single row are slow: most streams have one sample, and most messages a token of each.
        is_offered = (np.diff(starts) == 1) & (block.reasons[firsts] == 0) & block.tokens.can_be_listed
        is_offered &= [sink.takes_offers for sink in sinks]
        offers = block.list_rows(firsts[is_offered])
        for i, (sink, offered) in enumerate(zip(sinks, is_offered.tolist(), strict=True)):
            if not (offered and sink.offer(*next(offers))):
                sink.on_tokens(block.cut(starts[i], starts[i + 1], ends[i], ends[i + 1]))

    def _end_samples(self, slots: Int64) -> Int64:
        """A sample of each slot (with repeats) has ended; returns those whose request has ended with it."""
        np.subtract.at(self._num_open, slots, 1)
        slots = np.unique(slots)
        num_open = self._num_open[slots]
        assert (num_open >= 0).all(), "a sample goes on after its end"
        self._discharge(slots, np.minimum(self._charged[slots], num_open * self._max_tokens[slots]))
        over: Int64 = slots[num_open == 0]
        return over

    def on_prefills(self, message: Prefills) -> None:
        """Prompts are computed."""
        ids = as_i32(message.request_ids)
        slots = self._slots(ids)
        is_known = self._ids[slots] == ids
        slots = slots[is_known]
        if slots.size:
            self._cached[slots] = as_i32(message.cached_tokens)[is_known]
            self._metrics.prefills(int(self._num_prompt[slots].sum()), self._clock() - self._submitted[slots])

    def on_prefilled(self, message: Prefilled) -> None:
        """A prompt whose log-probs are wanted is computed."""
        cached = i32_column([message.cached_tokens])
        self.on_prefills(Prefills(request_ids=i32_column([message.request_id]), cached_tokens=cached))
        if found := self.find(message.request_id):
            sink, key = found
            sink.on_prompt(key, message)

    def on_failed(self, request_id: int, error: Exception) -> None:
        """The scheduler refuses a request."""
        if self.find(request_id):
            self._fail(np.asarray([self._slot(request_id)]), error)

    def fail_all(self, error: Exception) -> None:
        """The engine is gone."""
        self._fail(np.flatnonzero(self._ids != FREE), error)

    def lose(self, replica: int, error: Exception) -> None:
        """A replica is gone: requests of which no client has seen anything go to another one, once; the rest fail."""
        slots = np.flatnonzero((self._ids != FREE) & (self._replica == replica))
        can_retry = ~self._is_retry[slots] & bool(self._replicas.live)
        for sink, mine in self._by_sink(slots):
            seen = mine & can_retry & self._has_tokens[slots]
            if seen.any() and not sink.forget(self._keys[slots[seen]]):
                can_retry &= ~seen
        self._fail(slots[~can_retry], error)
        again = slots[can_retry]
        retries = [
            (self._columns[each[0]].take(self._rows[each]), self._sinks[each[0]], since, deadlines)
            for each in self._by_columns(again)
            for since, deadlines in [(self._submitted[each], self._deadlines[each])]
        ]
        self._release(again, is_over=False)
        for requests, sink, since, deadlines in retries:
            for at, chosen in self._place(requests, sink):
                self._submitted[at] = since[chosen]
                self._deadlines[at] = deadlines[chosen]
                self._is_retry[at] = True

    # ---- slots -------------------------------------------------------------------------------------------------------

    def _slot(self, request_id: int) -> int:
        return request_id & self._mask

    def _slots(self, ids: Int32) -> Int64:
        return (ids & self._mask).astype(np.int64)

    def _by_sink(self, slots: Int64) -> list[tuple[Sink, Bool]]:
        """The sinks of the slots' requests, and which are whose."""
        sink_ids = self._sink_ids[slots]
        _, firsts = np.unique(sink_ids, return_index=True)
        return [(self._sinks[slots[first]], sink_ids == sink_ids[first]) for first in firsts.tolist()]

    def _by_columns(self, slots: Int64) -> list[Int64]:
        """The slots by the columns that they were submitted in, each in the order of its rows."""
        slots = slots[np.argsort(self._rows[slots], kind="stable")]
        sent = np.asarray([id(requests) for requests in self._columns[slots]], np.int64)
        return [slots[sent == one] for one in np.unique(sent)]

    def _fail(self, slots: Int64, error: Exception) -> None:
        for sink, mine in self._by_sink(slots):
            sink.on_failed(self._keys[slots[mine]], error)
        self._metrics.failed(slots.size)
        self._release(slots)

    def _discharge(self, slots: Int64, left: Int64 | int) -> None:
        """The replicas of the slots count as busy with `left` of their tokens from now on."""
        freed = np.bincount(self._replica[slots], self._charged[slots] - left)
        self._charged[slots] = left
        for replica, num_tokens in enumerate(freed.tolist()):
            self._replicas.router.release(replica, int(num_tokens))

    def _release(self, slots: Int64, *, is_over: bool = True) -> None:
        """The slots are free again. is_over: their requests have ended."""
        if not slots.size:
            return
        self._discharge(slots, 0)
        if self.num_accounted:
            for sink, mine in self._by_sink(slots):
                if sink.account is not None:
                    self.num_accounted -= int(mine.sum())
                    sink.account.give_back(Cost(int(mine.sum()), int(self._num_tokens[slots[mine]].sum())))
        next_ids = self._ids[slots].astype(np.int64) + self._mask + 1 & MOST_ID
        self._free.extend(next_ids.tolist())
        self._ids[slots] = FREE
        self._sink_ids[slots] = 0
        self._sinks[slots] = self._columns[slots] = None
        self._cached[slots] = 0
        self._has_tokens[slots] = self._is_retry[slots] = False
        self._deadlines[slots] = np.inf
        if is_over and not self.num_requests:
            self._on_empty()

    def check(self) -> None:
        """For tests: the slots are free or taken, and the replicas count as busy with what the requests may need."""
        held = np.flatnonzero(self._ids != FREE)
        assert held.size == self.num_requests
        assert sorted([*held.tolist(), *(self._slot(each) for each in self._free)]) == [*range(self._capacity)]
        assert all((self._sinks[slot] is not None) == (self._ids[slot] != FREE) for slot in range(self._capacity))
        outstanding = self._replicas.router.outstanding
        charged = np.bincount(self._replica[held], self._charged[held], minlength=len(outstanding))
        assert outstanding == charged.tolist()
        assert set(self._replica[held].tolist()) <= set(self._replicas.live)
