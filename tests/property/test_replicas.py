"""The engine over replicas that come and go at random: every request ends exactly once, and loads add up."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.scheduler import READY, FakeScheduler
from toka_async.messages import SamplingParams, StopMask
from toka_async.server.engine.engine import Engine
from toka_async.server.engine.inflight import EngineStoppedError, InFlight, RequestGroup
from toka_async.server.limits.jobs import EngineRequest, NotServingError

NUM = 3


@dataclass
class Submitted:
    batch: RequestGroup
    left: ExitStack  # leaving it with an error cancels
    num_tokens: int  # of each sample
    in_blocks: bool
    cancelled: bool = False


class World:
    """An engine, its replicas' fake schedulers, and the clients."""

    def __init__(self) -> None:
        self.schedulers = [self._scheduler(replica, 0) for replica in range(NUM)]
        self.engine = Engine(self.schedulers, max_requests=1000)
        self.lives = [0] * NUM
        self.lost: list[FakeScheduler] = []
        self.clients: list[Submitted] = []
        self.ends: dict[int, int] = {}
        for scheduler in self.schedulers:
            scheduler.start(self.engine.on_messages)
        self.engine.tell_all(StopMask(stop_id=0, mask=memoryview(bytes(400)), window=2))

    @staticmethod
    def _scheduler(replica: int, life: int) -> FakeScheduler:
        return FakeScheduler(held=True, ready=msgspec.structs.replace(READY, replica=replica, life=life))

    def submit(self, first: int, n: int, max_tokens: int, kind: int) -> None:
        job = EngineRequest(
            prompt=np.arange(first, first + 40, dtype=np.int32),
            n=n,
            max_tokens=max_tokens,
            seed=first,
            sampling=SamplingParams(),
            stream=kind == 0,
            priority=0,
            stop_id=0,
            in_blocks=kind == 1,
        )
        stack = ExitStack()
        try:
            batch = stack.enter_context(self.engine.submitted([job, job]))
        except NotServingError:
            assert not self.engine.replicas.live
            return
        self.clients.append(Submitted(batch, stack, max_tokens, kind == 1))
        for flight in batch.flights:
            self._count_ends(flight)

    def _count_ends(self, flight: InFlight) -> None:
        note_end = flight.batch.note_end
        key = id(flight)
        self.ends[key] = 0

        def counted(error: Exception | None) -> None:
            self.ends[key] += 1
            note_end(error)

        flight.batch = _Counted(flight.batch, counted)  # type: ignore[assignment]

    def cancel(self, index: int) -> None:
        if self.clients:
            client = self.clients[index % len(self.clients)]
            if not client.cancelled:
                client.cancelled = True
                client.left.__exit__(RuntimeError, RuntimeError(), None)

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

    def check(self) -> None:
        replicas = self.engine.replicas
        charged = [0] * NUM
        for placement in replicas._placements.values():
            charged[placement.replica] += placement.charged
            assert placement.replica in replicas.live
        assert replicas.router.outstanding == charged
        assert replicas._placements.keys() == self.engine._inflight.keys()
        assert all(request_id == flight.request_id for request_id, flight in self.engine._inflight.items())


@dataclass
class _Counted:
    """A batch whose ends are counted."""

    batch: RequestGroup
    note_end: object

    def note(self, index: int, sample: int) -> None:
        self.batch.note(index, sample)


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
        world.check()
    for replica in range(NUM):
        world.revive(replica)
    for first in range(NUM):
        world.submit(100 * first, 1, 4, 0)
    for _ in range(5):
        world.late(0)
        for replica in range(NUM):
            world.step(replica)
    world.check()
    assert not world.engine._inflight
    assert world.engine.replicas.router.outstanding == [0] * NUM
    for client in world.clients:
        ended = [world.ends[id(flight)] for flight in client.batch.flights]
        assert all(count <= 1 for count in ended)
        if client.cancelled:
            continue
        assert all(ended)
        if client.batch.error is None:
            for flight in client.batch.flights:
                counts = flight.take_block().counts if client.in_blocks else [s.num_tokens for s in flight.samples]
                assert flight.num_open == 0
                assert sum(counts) == client.num_tokens * len(flight.samples or flight._closed)
        else:
            assert isinstance(client.batch.error, EngineStoppedError)
        client.left.close()
    assert not world.engine.busy
