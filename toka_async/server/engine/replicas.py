"""The replicas as the server sees them: one outbox each, what they can hold, which requests they have.

Requests go to one of them, stop sets to all. Knows what is sent, and nothing of what comes back of a request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from toka_async.messages import (
    AskStats,
    Cancel,
    Cancels,
    DropStop,
    EndSample,
    Ready,
    Stats,
    StopMask,
    Submit,
    Submits,
    ToScheduler,
)
from toka_async.server.engine.replica_stats import counters, merged
from toka_async.server.engine.router import ReplicaRouter
from toka_async.server.limits.account import do_nothing
from toka_async.transport.base import Outbox

ASK_SECONDS = 0.25  # in which a scheduler that is asked for its counts answers, unless something is wrong with it


@dataclass(slots=True)
class Replica:
    """One of them. lost: why it is away, while it is. past: counters of the schedulers that it had before."""

    outbox: Outbox[ToScheduler]
    ready: Ready | None = None
    life: int = 0
    lost: str | None = None
    stats: Stats = field(default_factory=Stats)
    past: Stats = field(default_factory=Stats)


@dataclass(slots=True)
class Placement:
    """The replica of a request, or of a bundle of them, and the tokens for which that counts as busy."""

    key: int  # the request's id, or the first one's
    submit: Submit | Submits
    replica: int
    charged: int
    retried: bool


class Replicas:
    """All replicas of one server.

    Args:
        outboxes: to their schedulers.
        page_size: tokens of a page of their caches.

    Attributes:
        ready: what a request may need at most, so that any of them can take it; None until all have been ready.
        live: those that take requests.
        on_news: called with the number of a replica whose statistics have come.
    """

    def __init__(self, outboxes: Sequence[Outbox[ToScheduler]], page_size: int = 16) -> None:
        self.replicas = [Replica(outbox) for outbox in outboxes]
        self.router = ReplicaRouter(len(outboxes), page_size)
        self.ready: Ready | None = None
        self.live: list[int] = []
        self.on_news: Callable[[int], None] = do_nothing
        self._placements: dict[int, Placement] = {}
        self._masks: dict[int, StopMask] = {}
        self._num_asked = 0
        self._asked: set[int] = set()  # replicas that have not answered the newest question
        self._answered = asyncio.Event()

    @property
    def stats(self) -> Stats:
        """Of all together, as they have last told: `refresh` makes that now."""
        parts = [replica.stats for replica in self.replicas]
        past = [replica.past for replica in self.replicas if replica.life]
        return merged([*parts, *past])

    def lost(self) -> dict[int, str]:
        """Those that are away, and why."""
        return {index: each.lost for index, each in enumerate(self.replicas) if each.lost is not None}

    # ---- to them -----------------------------------------------------------------------------------------------------

    def submit(self, submit: Submit, *, retried: bool = False) -> None:
        """Sends a new request to the replica that suits it best; one must be live."""
        charged = len(submit.prompt) // 4 + submit.n * submit.max_tokens
        replica = self.router.place(submit.prompt, charged, self.live, submit.salt)
        self._placements[submit.request_id] = Placement(submit.request_id, submit, replica, charged, retried)
        self.replicas[replica].outbox.send(submit)

    def send_bundle(self, key: int, submits: Submits, replica: int, *, retried: bool) -> None:
        """Sends new requests to a replica that was chosen, and charged, by the router. One entry for all of them."""
        num_samples = submits.n * (len(submits.lengths) // 4)
        charged = len(submits.prompts) // 4 + num_samples * submits.max_tokens
        self._placements[key] = Placement(key, submits, replica, charged, retried)
        self.replicas[replica].outbox.send(submits)

    def tell_bundle(self, key: int, message: Cancels) -> None:
        """Sends to the replica that has the bundle."""
        self.replicas[self._placements[key].replica].outbox.send(message)

    def tell(self, message: Cancel | EndSample) -> None:
        """Sends to the replica that has the request."""
        self.replicas[self._placements[message.request_id].replica].outbox.send(message)

    def tell_all(self, message: StopMask | DropStop) -> None:
        """Sends to every replica, to those that are away when they are back."""
        if isinstance(message, StopMask):
            self._masks[message.stop_id] = message
        else:
            del self._masks[message.stop_id]
        for replica in self.replicas:
            if replica.lost is None:
                replica.outbox.send(message)

    def settle(self, request_id: int, num_open: int) -> None:
        """So many of the samples of the request, or of the bundle, still run."""
        placement = self._placements[request_id]
        left = min(placement.charged, num_open * placement.submit.max_tokens)
        self.router.release(placement.replica, placement.charged - left)
        placement.charged = left

    def end(self, request_id: int) -> None:
        """The request, or the bundle, is over, however it ended."""
        placement = self._placements.pop(request_id)
        self.router.release(placement.replica, placement.charged)

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
        self._count()

    def on_stats(self, stats: Stats) -> None:
        replica = self.replicas[stats.replica]
        if stats.life == replica.life:
            replica.stats = stats
            self.on_news(stats.replica)
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

    def lose(self, index: int, life: int, reason: str, outbox: Outbox[ToScheduler]) -> list[Placement]:
        """The replica is gone; `outbox` is to its next life. Returns the requests that it had, which are over here."""
        replica = self.replicas[index]
        replica.past = merged([replica.past, counters(replica.stats)])
        replica.life, replica.lost, replica.outbox, replica.stats = life, reason, outbox, Stats()
        self.router.forget(index)
        self._note_answer(index)
        self._count()
        had = [placement for placement in self._placements.values() if placement.replica == index]
        for placement in had:
            self.end(placement.key)
        return had

    def _count(self) -> None:
        self.live = [index for index, each in enumerate(self.replicas) if each.ready and each.lost is None]
        ready = [each.ready for each in self.replicas if each.ready]
        if len(ready) == len(self.replicas):
            self.ready = msgspec.structs.replace(
                ready[0],
                num_pages=min(each.num_pages for each in ready),
                max_context=min(each.max_context for each in ready),
            )
