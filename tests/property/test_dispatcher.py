"""The dispatcher of a pool under any order of requests, answers, losses and rests: each request ends exactly once."""

from __future__ import annotations

from random import Random

import msgspec
import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from toka_async.client.dispatcher import DispatchedReplica, Dispatcher
from toka_async.client.errors import ConnectionLostError, ReplicaLostError, RequestError
from toka_async.client.pending import News, Pending, RequestOptions
from toka_async.client.results import Event, Result, Sample

NO_TOKENS = np.empty(0, np.int32)
SAMPLE = Sample(NO_TOKENS, "", "stop")
CHOICE = st.integers(0, 1 << 20)


class ListedReplica(DispatchedReplica):
    """Keeps what it was sent. cancelled: attempts that the dispatcher gave up."""

    def __init__(self, number: int, max_samples: int, max_requests: int) -> None:
        super().__init__(f"tcp://{number}")
        self.max_samples, self.max_requests = max_samples, max_requests
        self.attempts: list[Pending] = []
        self.is_resting = self.is_idle = self.is_full = False

    def begin(self, attempt: Pending) -> None:
        assert self.is_joined
        self.attempts.append(attempt)

    def abandon(self, attempt: Pending) -> None:
        self.attempts.remove(attempt)

    def rest(self, *, is_full: bool) -> None:
        self.is_resting = True
        self.is_full = is_full

    def note_idle(self) -> None:
        self.is_idle = True


class Asker:
    """A caller: what it was told. seeds: of its request's attempts."""

    def __init__(self, seed: int, n: int, stream: bool, prompt: int) -> None:
        fields = {"n": n, "max_tokens": 8}
        options = RequestOptions(fields, msgspec.msgpack.encode(fields), stream)
        self.pending = Pending(seed, np.full(3, prompt, np.int32), seed, options, self)
        self.ends: list[News] = []
        self.num_events = 0
        self.num_open = n
        self.is_abandoned = False
        self.num_lost = 0

    def tell(self, pending: Pending, news: News) -> None:
        assert pending is self.pending
        assert not self.is_abandoned
        assert not self.ends
        if isinstance(news, Event):
            assert self.pending.options.stream
            self.num_events += 1
            self.num_open -= news.finish_reason is not None
            if self.num_open:
                return
        self.ends.append(news)


class DispatcherMachine(RuleBasedStateMachine):
    @initialize(seed=CHOICE, max_lost=st.integers(0, 3))
    def start(self, seed: int, max_lost: int) -> None:
        self.max_lost = max_lost
        self.num_wakes = 0
        self.dispatcher = Dispatcher(max_lost, Random(seed), self.wake)
        self.replicas: list[ListedReplica] = []
        self.askers: list[Asker] = []
        self.over: list[Pending] = []  # attempts that have ended, or were given up
        self.num_late = 0

    def wake(self) -> None:
        self.num_wakes += 1

    def asker_of(self, attempt: Pending) -> Asker:
        asker = self.askers[attempt.seed]
        assert attempt.prompt is asker.pending.prompt
        assert attempt.options is asker.pending.options
        return asker

    def take(self, choice: int) -> tuple[ListedReplica, Pending]:
        """Any attempt that runs."""
        running = [(replica, attempt) for replica in self.replicas for attempt in replica.attempts]
        return running[choice % len(running)]

    def end(self, replica: ListedReplica, attempt: Pending, news: News) -> None:
        replica.attempts.remove(attempt)
        self.over.append(attempt)
        assert attempt.waiter is not None
        attempt.waiter.tell(attempt, news)

    # ---- replicas

    @rule(max_samples=st.integers(1, 9), max_requests=st.integers(1, 6))
    def add_replica(self, max_samples: int, max_requests: int) -> None:
        replica = ListedReplica(len(self.replicas), max_samples, max_requests)
        self.replicas.append(replica)
        self.dispatcher.join(replica)

    @precondition(lambda self: self.replicas)
    @rule(choice=CHOICE)
    def come_or_go(self, choice: int) -> None:
        replica = self.replicas[choice % len(self.replicas)]
        if replica.is_joined:
            replica.is_idle = False
            self.dispatcher.leave(replica)
            assert replica.is_idle == (not replica.attempts)
        else:
            self.dispatcher.join(replica)

    @precondition(lambda self: self.replicas)
    @rule(choice=CHOICE, max_samples=st.integers(1, 9))
    def resize(self, choice: int, max_samples: int) -> None:
        replica = self.replicas[choice % len(self.replicas)]
        self.dispatcher.resize(replica, max(max_samples, replica.samples))

    @precondition(lambda self: self.replicas)
    @rule(choice=CHOICE)
    def lose_replica(self, choice: int) -> None:
        replica = self.replicas[choice % len(self.replicas)]
        replica.is_idle = False
        self.dispatcher.leave(replica)
        for attempt in list(replica.attempts):
            asker = self.asker_of(attempt)
            asker.num_lost += 1
            self.end(replica, attempt, ConnectionLostError("killed"))
            self.check_loss(asker)
        assert replica.is_idle

    def check_loss(self, asker: Asker) -> None:
        if asker.num_events or asker.num_lost > self.max_lost:
            assert isinstance(asker.ends[0], ReplicaLostError)
        else:
            assert not asker.ends

    # ---- requests

    @rule(n=st.sampled_from([1, 1, 1, 2, 5, 12]), stream=st.booleans(), prompt=st.integers(0, 4))
    def submit(self, n: int, stream: bool, prompt: int) -> None:
        asker = Asker(len(self.askers), n, stream, prompt)
        self.askers.append(asker)
        self.dispatcher.submit(asker.pending)

    @precondition(lambda self: self.askers)
    @rule(choice=CHOICE)
    def abandon(self, choice: int) -> None:
        asker = self.askers[choice % len(self.askers)]
        running = [attempt for replica in self.replicas for attempt in replica.attempts]
        self.dispatcher.abandon([asker.pending])
        asker.is_abandoned = asker.is_abandoned or not asker.ends
        left = [attempt for replica in self.replicas for attempt in replica.attempts]
        self.over += [attempt for attempt in running if attempt not in left]
        assert all(self.asker_of(attempt) is not asker for attempt in left)

    @rule()
    def pull(self) -> None:
        self.num_wakes = 0
        self.dispatcher.pull()
        waiting = self.waiting()
        if waiting:  # the first in the queue has room nowhere; what was lost is before what came earlier
            joined = [each for each in self.replicas if each.is_joined]
            assert any(not any(each.fits(asker.pending.options.n) for each in joined) for asker in waiting)

    def waiting(self) -> list[Asker]:
        running = {attempt.seed for replica in self.replicas for attempt in replica.attempts}
        return [each for each in self.askers if not (each.ends or each.is_abandoned or each.pending.seed in running)]

    # ---- what replicas say

    @precondition(lambda self: any(replica.attempts for replica in self.replicas))
    @rule(choice=CHOICE, is_last=st.booleans())
    def answer(self, choice: int, is_last: bool) -> None:
        replica, attempt = self.take(choice)
        asker = self.asker_of(attempt)
        assert attempt.waiter is not None
        if not asker.pending.options.stream:
            self.end(replica, attempt, Result([SAMPLE] * attempt.options.n, 0))
        elif is_last and asker.num_open == 1:
            self.end(replica, attempt, Event(NO_TOKENS, "", "stop"))
        else:
            attempt.waiter.tell(attempt, Event(NO_TOKENS, "", "stop" if is_last else None))

    @precondition(lambda self: any(replica.attempts for replica in self.replicas))
    @rule(choice=CHOICE, code=st.sampled_from(["overloaded", "not_serving", "engine_stopped", "timeout", None]))
    def fail(self, choice: int, code: str | None) -> None:
        replica, attempt = self.take(choice)
        asker = self.asker_of(attempt)
        rests = code in ("overloaded", "not_serving", "engine_stopped")
        temporary = code in ("overloaded", "not_serving") and not asker.num_events
        lost = rests and not temporary
        asker.num_lost += lost
        replica.is_resting = False
        self.end(replica, attempt, RequestError("no", code=code))
        assert replica.is_resting == rests
        assert not rests or replica.is_full == (code == "overloaded")
        if lost:
            self.check_loss(asker)
        else:
            assert bool(asker.ends) == (not temporary)

    @precondition(lambda self: self.over)
    @rule(choice=CHOICE, fails=st.booleans())
    def say_late(self, choice: int, fails: bool) -> None:
        attempt = self.over[choice % len(self.over)]
        before = [(list(each.ends), each.num_events) for each in self.askers]
        assert attempt.waiter is not None
        attempt.waiter.tell(attempt, ConnectionLostError("late") if fails else Result([SAMPLE], 0))
        self.num_late += not fails
        assert [(list(each.ends), each.num_events) for each in self.askers] == before

    # ---- what always holds

    @invariant()
    def check(self) -> None:
        if not hasattr(self, "replicas"):
            return
        running = [attempt.seed for replica in self.replicas for attempt in replica.attempts]
        assert len(set(running)) == len(running), "a request runs once at a time"
        joined = [replica.samples for replica in self.replicas if replica.is_joined]
        assert self.dispatcher._choice.num_samples == sum(joined)
        for replica in self.replicas:
            samples = [attempt.options.n for attempt in replica.attempts]
            assert (replica.samples, replica.requests) == (sum(samples), len(samples))
            assert sum(samples) <= replica.max_samples or len(samples) == 1
            assert replica.requests <= replica.max_requests
            assert replica.tokens == sum(3 + 8 * n for n in samples)
        assert self.dispatcher.num_late == self.num_late
        num_open = sum(not (each.ends or each.is_abandoned) for each in self.askers)
        assert self.dispatcher.num_open == num_open
        if any(replica.is_joined and not replica.attempts for replica in self.replicas) and self.waiting():
            assert self.num_wakes, "somebody is told that there is room"

    def teardown(self) -> None:
        """With a replica that answers, everything ends."""
        if not hasattr(self, "replicas"):
            return
        self.add_replica(3, 3)
        for _ in range(sum(each.pending.options.n for each in self.askers) + 1):  # a round ends a sample at least
            self.dispatcher.pull()
            for replica in self.replicas:
                for attempt in list(replica.attempts):
                    self.answer(0, True)
                    del attempt
        assert all(len(each.ends) == (not each.is_abandoned) for each in self.askers)
        assert not self.dispatcher.num_open


DispatcherMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestDispatcher = DispatcherMachine.TestCase
