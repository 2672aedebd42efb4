"""The replicas as the server sees them: one outbox each, what they can hold, which requests they have.

Requests go to one of them, stop sets to all. Knows what is sent, nothing of what comes back of a request, and how the
statistics of several replicas become one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest

import msgspec
import numpy as np

from toka_async.arrays import EMPTY, Int64, as_i64, column
from toka_async.control import Control
from toka_async.messages import (
    AskStats,
    Cancels,
    DropStop,
    EndSample,
    Ready,
    Stats,
    StopMask,
    Submits,
    ToScheduler,
)
from toka_async.server.engine.request_columns import RequestColumns
from toka_async.server.engine.router import ReplicaRouter
from toka_async.transport.base import Outbox

ASK_SECONDS = 0.25  # in which a scheduler that is asked for its counts answers, unless something is wrong with it
_STATE = (
    "num_running",
    "num_waiting",
    "pages_used",
    "pages_cached",
    "num_pages",
    "num_window_pages",
    "window_pages_used",
    "window_pages_cached",
    "num_snapshots",
    "snapshots_used",
    "snapshots_cached",
)
_COUNTERS = (
    "prefix_queries",
    "prefix_hits",
    "num_preemptions",
    "prompt_tokens",
    "generated_tokens",
    "wasted_tokens",
    "recomputed_tokens",
    "num_steps",
    "step_seconds",
    "idle_seconds",
    "device_idle_seconds",
    "num_compiles",
    "num_started",
    "queue_seconds",
    "prefix_shared",
    "token_gap_seconds",
    "num_prompt_steps",
    "prompt_step_seconds",
    "masked_rows",
    "mask_seconds",
    "mask_stall_seconds",
)
NO_TIMES = (0.0, 0.0, 0.0)


@dataclass(slots=True)
class Replica:
    """One of them. lost: why it is away, while it is. past: counters of the schedulers that it had before.

    is_outdated: its weights are those of its start, and others have newer ones.
    """

    outbox: Outbox[ToScheduler]
    ready: Ready | None = None
    life: int = 0
    lost: str | None = None
    stats: Stats = field(default_factory=Stats)
    past: Stats = field(default_factory=Stats)
    is_outdated: bool = False


class Replicas:
    """All replicas of one server.

    Args:
        outboxes: to their schedulers.
        page_size: tokens of a page of their caches.

    Attributes:
        ready: what a request may need at most, so that any of them can take it; None until all have been ready.
        live: those that take requests.
        on_news: all are called with the number of a replica whose statistics have come.
        on_return: all are called with the number of a replica that is back, before requests go to it.
    """

    def __init__(self, outboxes: Sequence[Outbox[ToScheduler]], page_size: int = 16) -> None:
        self.replicas = [Replica(outbox) for outbox in outboxes]
        self.router = ReplicaRouter(len(outboxes), page_size)
        self.ready: Ready | None = None
        self.live: list[int] = []
        self.on_news: list[Callable[[int], None]] = []
        self.on_return: list[Callable[[int], None]] = []
        self._masks: dict[int, StopMask] = {}
        self._num_asked = 0
        self._asked: set[int] = set()  # replicas that have not answered the newest question
        self._answered = asyncio.Event()

    @property
    def stats(self) -> Stats:
        """Of all together, as they have last told: `refresh` makes that now."""
        parts = [replica.stats for replica in self.replicas]
        past = [replica.past for replica in self.replicas if replica.life]
        return merge_stats([*parts, *past])

    @property
    def present(self) -> list[int]:
        """Those whose scheduler is there."""
        return [index for index, each in enumerate(self.replicas) if each.ready and each.lost is None]

    @property
    def outdated(self) -> list[int]:
        """Those that take no requests until they have the weights of the others."""
        return [index for index, each in enumerate(self.replicas) if each.is_outdated]

    def note_outdated(self, index: int) -> None:
        """The replica comes back with the weights of its start, which others do not have any more."""
        self.replicas[index].is_outdated = True
        self._count()

    def note_current(self, indices: Iterable[int]) -> None:
        """All tensors of these replicas have been updated, unless they have died since."""
        for index in indices:
            self.replicas[index].is_outdated &= self.replicas[index].lost is not None
        self._count()

    def forget_prompts(self) -> None:
        """The prompts that the replicas have in their caches are not found there any more."""
        for index in range(len(self.replicas)):
            self.router.forget(index)

    def lost(self) -> dict[int, str]:
        """Those that are away, and why."""
        outdated = dict.fromkeys(self.outdated, "it waits for an update of its weights")
        return outdated | {index: each.lost for index, each in enumerate(self.replicas) if each.lost is not None}

    # ---- to them -----------------------------------------------------------------------------------------------------

    def place(self, requests: RequestColumns, num_tokens: Int64) -> list[tuple[int, Int64]]:
        """Chooses the replica that suits each request best, and counts it as busy with the tokens; one must be live.

        Returns each replica chosen, with its rows.
        """
        if len(self.live) == 1:
            self.router.charge(self.live[0], sum(num_tokens.tolist()))
            return [(self.live[0], np.arange(len(requests)))]
        ends = np.cumsum(requests.lengths)
        bounds = zip((4 * (ends - requests.lengths)).tolist(), (4 * ends).tolist(), num_tokens.tolist(), strict=True)
        prompts, place = column(requests.prompts), self.router.place
        chosen = [place(prompts[start:end], charge, self.live, requests.salt) for start, end, charge in bounds]
        return [(replica, np.flatnonzero(np.asarray(chosen) == replica)) for replica in sorted(set(chosen))]

    def send(self, replica: int, message: Submits | Cancels | EndSample | Control) -> None:
        """Sends to one replica, which is live or has just been lost."""
        self.replicas[replica].outbox.send(message)

    def tell_all(self, message: StopMask | DropStop) -> None:
        """Sends to every replica, to those that are away when they are back."""
        if isinstance(message, StopMask):
            self._masks[message.stop_id] = message
        else:
            del self._masks[message.stop_id]
        for replica in self.replicas:
            if replica.lost is None:
                replica.outbox.send(message)

    # ---- from them ---------------------------------------------------------------------------------------------------

    def on_ready(self, ready: Ready) -> None:
        """A replica takes requests from now on, unless it has died since."""
        replica = self.replicas[ready.replica]
        if ready.life != replica.life:
            return
        replica.ready = ready
        if replica.lost is not None:
            replica.lost = None
            for mask in self._masks.values():
                replica.outbox.send(mask)
            for listener in self.on_return:
                listener(ready.replica)
        self._count()

    def on_stats(self, stats: Stats) -> None:
        replica = self.replicas[stats.replica]
        if stats.life == replica.life:
            replica.stats = stats
            for listener in self.on_news:
                listener(stats.replica)
            if stats.answers == self._num_asked:
                self._note_answer(stats.replica)

    async def refresh(self, forecast: bool = False) -> None:
        """Asks the schedulers what they do now, and waits for their answers, ASK_SECONDS at most.

        What they tell contains everything of them that had been received before. Who asks meanwhile shares the answer,
        which has a forecast if the first of them wanted it.
        """
        if not self._asked and self.live:
            self._num_asked += 1
            self._asked.update(self.live)
            self._answered.clear()
            for index in self.live:
                self.replicas[index].outbox.send(AskStats(number=self._num_asked, forecast=forecast))
        if self._asked:
            with suppress(TimeoutError):
                async with asyncio.timeout(ASK_SECONDS):
                    await self._answered.wait()

    def _note_answer(self, replica: int) -> None:
        """It has answered, or never will."""
        self._asked.discard(replica)
        if not self._asked:
            self._answered.set()

    def lose(self, index: int, life: int, reason: str, outbox: Outbox[ToScheduler]) -> None:
        """The replica is gone; `outbox` is to its next life."""
        replica = self.replicas[index]
        replica.past = merge_stats([replica.past, keep_counters(replica.stats)])
        replica.life, replica.lost, replica.outbox, replica.stats = life, reason, outbox, Stats()
        self.router.forget(index)
        self._note_answer(index)
        self._count()

    def _count(self) -> None:
        self.live = [index for index in self.present if not self.replicas[index].is_outdated]
        ready = [each.ready for each in self.replicas if each.ready]
        if len(ready) == len(self.replicas):
            self.ready = msgspec.structs.replace(
                ready[0],
                num_pages=min(each.num_pages for each in ready),
                max_context=min(each.max_context for each in ready),
            )


def merge_stats(parts: Sequence[Stats]) -> Stats:
    """Several replicas' statistics as one: sums; of percentiles the worst replica's, of expected lengths the mean.

    Forecasts and the costs of steps stay with their replicas.
    """
    if len(parts) == 1:
        return parts[0]
    sums = {name: sum(getattr(part, name) for part in parts) for name in (*_STATE, *_COUNTERS)}
    lengths = [part.expected_length for part in parts if part.expected_length is not None]
    mean, spread = (sum(values) / max(1, len(lengths)) for values in ((a for a, _ in lengths), (b for _, b in lengths)))
    return Stats(
        **sums,
        depths=tuple(int(sum(column)) for column in _columns(part.depths for part in parts)),
        pipeline=tuple(map(_add_times, zip_longest(*(part.pipeline for part in parts), fillvalue=NO_TIMES))),
        expert_loads=tuple(map(_add_loads, zip_longest(*(part.expert_loads for part in parts), fillvalue=EMPTY))),
        stage_seconds=tuple(sum(column) for column in _columns(part.stage_seconds for part in parts)),
        token_gaps=tuple(int(sum(column)) for column in _columns(part.token_gaps for part in parts)),
        scheduler_us=tuple(max(column) for column in _columns(part.scheduler_us for part in parts)),
        forecast_us=tuple(max(column) for column in _columns(part.forecast_us for part in parts)),
        expected_length=(mean, spread) if lengths else None,
    )


def keep_counters(stats: Stats) -> Stats:
    """The counters alone, as they stay of a scheduler that is gone, so that sums never fall."""
    state = dict.fromkeys(_STATE, 0)
    return msgspec.structs.replace(
        stats, **state, scheduler_us=(), forecast_us=(), expected_length=None, step_costs=(), forecast=None
    )


def _add_times(stages: Iterable[tuple[float, float, float]]) -> tuple[float, float, float]:
    """One stage's times of all replicas."""
    seconds, stalled, waited = (sum(column) for column in zip(*stages, strict=True))
    return seconds, stalled, waited


def _add_loads(layers: Iterable[memoryview]) -> memoryview:
    """One layer's loads of all replicas, of which some may have none yet."""
    loads = [as_i64(layer) for layer in layers if len(layer)]
    return column(sum(loads[1:], loads[0])) if loads else EMPTY


def _columns(rows: Iterable[Sequence[float]]) -> Iterable[tuple[float, ...]]:
    return zip_longest(*rows, fillvalue=0)
