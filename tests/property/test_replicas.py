"""The engine over replicas that come and go at random: every request ends exactly once, and loads add up."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases.requests import make_prompt, make_requests
from tests.fakes.scheduler import READY, FakeScheduler
from toka_async.arrays import Int64
from toka_async.messages import Prefilled, StopMask
from toka_async.server.engine.engine import Engine
from toka_async.server.engine.request_group import EngineStoppedError
from toka_async.server.engine.token_block import Score, TokenBlock
from toka_async.server.limits.account import Account
from toka_async.server.limits.jobs import NotServingError

NUM = 3
NUM_PROMPTS = 2


@dataclass(eq=False)
class Client:
    """A sink that counts what it is told. num_tokens: of each sample. forgets: it has shown nobody what has come."""

    num_tokens: int
    n: int
    forgets: bool
    account: Account | None
    counts: dict[tuple[int, int], int] = field(default_factory=dict)
    ends: list[int] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    cancelled: bool = False

    def on_tokens(self, block: TokenBlock) -> None:
        rows = zip(block.keys.tolist(), block.samples.tolist(), block.counts.tolist(), strict=True)
        for key, sample, count in rows:
            self.counts[key, sample] = self.counts.get((key, sample), 0) + count
        self.ends += np.unique(block.keys[block.is_last != 0]).tolist()

    @property
    def takes_offers(self) -> bool:
        return False

    def offer(self, _token_ids: list[int], _scores: list[Score]) -> bool:
        return False

    def on_prompt(self, key: int, prefilled: Prefilled) -> None:
        raise NotImplementedError

    def on_failed(self, keys: Int64, error: Exception) -> None:
        self.ends += keys.tolist()
        self.errors.append(error)

    def forget(self, keys: Int64) -> bool:
        if self.forgets:
            self.counts = {place: count for place, count in self.counts.items() if place[0] not in keys}
        return self.forgets

    def check(self) -> None:
        assert len(self.ends) == len(set(self.ends))
        if self.cancelled:
            return
        assert sorted(self.ends) == [*range(NUM_PROMPTS)]
        assert all(isinstance(error, EngineStoppedError) for error in self.errors)
        if not self.errors:
            assert set(self.counts.values()) == {self.num_tokens}
            assert len(self.counts) == NUM_PROMPTS * self.n


class World:
    """An engine, its replicas' fake schedulers, and the clients."""

    def __init__(self) -> None:
        self.schedulers = [self._scheduler(replica, 0) for replica in range(NUM)]
        self.engine = Engine(self.schedulers, max_requests=100)
        self.account = Account("everybody")
        self.lives = [0] * NUM
        self.lost: list[FakeScheduler] = []
        self.clients: list[Client] = []
        for scheduler in self.schedulers:
            scheduler.start(self.engine.on_messages)
        self.engine.replicas.tell_all(StopMask(stop_id=0, mask=memoryview(bytes(400)), window=2))

    @staticmethod
    def _scheduler(replica: int, life: int) -> FakeScheduler:
        return FakeScheduler(held=True, ready=msgspec.structs.replace(READY, replica=replica, life=life))

    def submit(self, first: int, n: int, max_tokens: int, kind: int) -> None:
        client = Client(max_tokens, n, kind == 1, self.account if kind == 2 else None)
        prompts = [make_prompt(first, 40)] * NUM_PROMPTS
        requests = make_requests(*prompts, n=n, max_tokens=max_tokens, stream=kind == 0, stop_id=0)
        try:
            self.engine.submit(requests, client)
        except NotServingError:
            assert not self.engine.replicas.live
            return
        self.clients.append(client)

    def cancel(self, index: int) -> None:
        if self.clients:
            client = self.clients[index % len(self.clients)]
            client.cancelled = True
            client.ends += self.engine.requests.cancel(client).tolist()

    def lose(self, replica: int) -> None:
        self.lives[replica] += 1
        self.lost.append(self.schedulers[replica])
        self.schedulers[replica] = self._scheduler(replica, self.lives[replica])
        self.engine.lose(replica, self.lives[replica], "killed", self.schedulers[replica])

    def revive(self, replica: int) -> None:
        if replica in self.engine.replicas.lost():
            self.schedulers[replica].start(self.engine.on_messages)

    def step(self, replica: int) -> None:
        self.schedulers[replica].step()

    def late(self, _: int) -> None:
        """What a lost scheduler had sent still arrives."""
        for scheduler in self.lost:
            scheduler.step()


REPLICA = st.integers(0, NUM - 1)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("submit"), st.sampled_from([0, 16, 50]), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2)
        ),
        st.tuples(st.sampled_from(["step", "lose", "revive", "late"]), REPLICA),
        st.tuples(st.just("cancel"), st.integers(0, 9)),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=200)
@given(OPERATIONS)
def test_every_request_ends_once(operations: list[tuple[str, int]]) -> None:
    world = World()
    for name, *arguments in operations:
        getattr(world, name)(*arguments)
        world.engine.requests.check()
    for replica in range(NUM):
        world.revive(replica)
    for first in range(NUM):
        world.submit(100 * first, 1, 4, 0)
    for _ in range(5):
        world.late(0)
        for replica in range(NUM):
            world.step(replica)
    world.engine.requests.check()
    for client in world.clients:
        client.check()
    assert not world.engine.num_requests
    assert not world.engine.busy
    assert (world.account.num_requests, world.account.num_tokens, world.engine.requests.num_accounted) == (0, 0, 0)
