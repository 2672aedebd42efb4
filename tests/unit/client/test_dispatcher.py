"""What `property/test_dispatcher.py` does not say: whose requests a replica takes first."""

from __future__ import annotations

from random import Random

import msgspec
import numpy as np
import pytest

from toka_async.client import dispatcher as limits
from toka_async.client.dispatcher import DispatchedReplica, Dispatcher
from toka_async.client.errors import ConnectionLostError
from toka_async.client.pending import News, Pending, RequestOptions
from toka_async.client.results import Result


class OneAtATime(DispatchedReplica):
    """Takes one request at a time. taken: the numbers of all of them."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.taken: list[int] = []
        self.attempt: Pending | None = None

    def begin(self, attempt: Pending) -> None:
        self.taken.append(attempt.seed)
        self.attempt = attempt

    def abandon(self, attempt: Pending) -> None:
        assert attempt is self.attempt

    def rest(self, *, is_full: bool) -> None: ...

    def note_idle(self) -> None: ...

    def answer(self) -> None:
        assert self.attempt is not None
        assert self.attempt.waiter is not None
        self.attempt.waiter.tell(self.attempt, Result([], 0))


class Pooled:
    """A dispatcher of two replicas, with requests of the one's prefix, all waiting behind two that run."""

    def __init__(self) -> None:
        self.dispatcher = Dispatcher(3, Random(0), lambda: None)
        self.one, self.two = OneAtATime("tcp://one"), OneAtATime("tcp://two")
        self.prompts: dict[str, int] = {}  # one that belongs to each replica
        self.dispatcher.join(self.one)
        self.dispatcher.join(self.two)
        for prompt in range(50):
            self.ask(1000 + prompt, prompt)
            for replica in (self.one, self.two):
                if replica.taken and replica.taken[0] == 1000 + prompt:
                    self.prompts.setdefault(replica.url, prompt)
            if len(self.prompts) == 2:
                break
        for replica in (self.one, self.two):
            replica.taken.clear()

    def tell(self, pending: Pending, news: News) -> None: ...

    def ask(self, number: int, prompt: int) -> None:
        options = RequestOptions({}, msgspec.msgpack.encode({}), False)
        self.dispatcher.submit(Pending(number, np.full(4, prompt, np.int32), number, options, self))

    def answer(self, replica: OneAtATime) -> None:
        replica.answer()
        self.dispatcher.pull()


@pytest.fixture
def pooled() -> Pooled:
    made = Pooled()
    assert len(made.prompts) == 2
    while made.dispatcher.num_open > 2:  # those that waited while the prompts were found
        made.answer(made.one)
    made.one.taken.clear()
    made.two.taken.clear()
    return made


def ask_for(pooled: Pooled, *urls: str) -> None:
    for number, url in enumerate(urls):
        pooled.ask(number, pooled.prompts[url])


def test_a_replica_takes_requests_of_its_own_prefixes_first(pooled: Pooled) -> None:
    one, two = pooled.one.url, pooled.two.url
    ask_for(pooled, one, one, two, one, two)
    for _ in range(3):
        pooled.answer(pooled.two)
    assert pooled.two.taken == [2, 4, 0], "then the oldest of the others"
    for _ in range(2):
        pooled.answer(pooled.one)
    assert pooled.one.taken == [1, 3]


def test_no_request_is_overtaken_by_too_many(pooled: Pooled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_OVERTAKING", 2)
    one, two = pooled.one.url, pooled.two.url
    ask_for(pooled, one, two, two, two, two)
    for _ in range(4):
        pooled.answer(pooled.two)
    assert pooled.two.taken == [1, 2, 0, 3]


def test_one_that_is_lost_comes_before_the_others(pooled: Pooled) -> None:
    ask_for(pooled, pooled.one.url, pooled.one.url)
    attempt = pooled.one.attempt
    assert attempt is not None
    assert attempt.waiter is not None
    pooled.dispatcher.leave(pooled.one)
    attempt.waiter.tell(attempt, ConnectionLostError("killed"))
    pooled.answer(pooled.two)
    assert pooled.two.taken == [attempt.seed]
