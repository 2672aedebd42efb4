"""Requests in columns through the engine, over replicas that are stepped by hand and that can be lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest

from tests.fakes.scheduler import READY, FakeScheduler
from toka_async.arrays import Int32, Int64, i32_column
from toka_async.messages import Failed, Reason, SamplingParams, Submits, Tokens
from toka_async.server.engine.direct_rows import DirectJobs, DirectRows
from toka_async.server.engine.engine import Engine
from toka_async.server.limits.account import Account
from toka_async.server.limits.jobs import EngineRequest, OverloadedError


@dataclass
class Listener:
    """An owner that keeps what it is told."""

    number: int = 1
    account: Account = field(default_factory=lambda: Account("a listener"))
    tokens: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    ended: list[int] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)

    def on_rows(self, rows: DirectRows, cached: Int32, ended: Int64) -> None:
        ends = np.cumsum(rows.counts)
        for key, sample, count, end, found in zip(
            rows.keys.tolist(), rows.samples.tolist(), rows.counts.tolist(), ends.tolist(), cached.tolist(), strict=True
        ):
            self.tokens.setdefault((key, sample), []).extend(rows.token_ids[end - count : end].tolist())
            self.cached[key] = found
        self.ended += ended.tolist()

    def on_failed(self, client_ids: Int64, error: Exception) -> None:
        self.failed |= dict.fromkeys(client_ids.tolist(), str(error))


class World:
    """An engine and its replicas' fake schedulers."""

    def __init__(self, num_replicas: int = 2, max_requests: int = 99) -> None:
        self.schedulers = [self.scheduler(replica) for replica in range(num_replicas)]
        self.engine = Engine(self.schedulers, max_requests)
        self.owner = Listener()
        for scheduler in self.schedulers:
            scheduler.start(self.engine.on_messages)

    @staticmethod
    def scheduler(replica: int, life: int = 0) -> FakeScheduler:
        return FakeScheduler(held=True, ready=msgspec.structs.replace(READY, replica=replica, life=life))

    def submit(self, *ids: int, n: int = 1, max_tokens: int = 3, stream: bool = False, length: int = 20) -> None:
        prompts = [np.arange(key, key + length, dtype=np.int32) % 300 for key in ids]
        self.engine.submit_direct(jobs(ids, prompts, n, max_tokens, stream), self.owner)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for scheduler in self.schedulers:
                scheduler.step()

    def lose(self, replica: int) -> None:
        self.schedulers[replica] = self.scheduler(replica, 1)
        self.engine.lose(replica, 1, "it was killed", self.schedulers[replica])

    @property
    def outstanding(self) -> list[int]:
        return self.engine.replicas.router.outstanding


def jobs(ids: Sequence[int], prompts: Sequence[Int32], n: int, max_tokens: int, stream: bool) -> DirectJobs:
    return DirectJobs(
        client_ids=np.asarray(ids),
        lengths=np.asarray([prompt.size for prompt in prompts], np.int32),
        prompts=np.concatenate(prompts),
        seeds=np.asarray(ids),
        n=n,
        max_tokens=max_tokens,
        sampling=SamplingParams(),
        stream=stream,
        priority=0,
        salt=0,
    )


@pytest.fixture
async def world() -> World:
    return World()


async def test_requests_go_to_both_replicas_and_come_back_under_their_own_ids(world: World) -> None:
    world.submit(*range(100, 120), n=2)
    assert all(world.outstanding)
    assert world.engine.num_requests == 20
    world.step(4)
    assert sorted(world.owner.ended) == [*range(100, 120)]
    assert {len(tokens) for tokens in world.owner.tokens.values()} == {3}
    assert len(world.owner.tokens) == 40
    assert set(world.owner.cached.values()) == {16}
    assert world.outstanding == [0, 0]
    assert not world.engine.busy


async def test_a_replica_gets_one_message(world: World) -> None:
    world.submit(*range(20))
    world.step()
    for scheduler in world.schedulers:
        (message,) = scheduler.log
        assert isinstance(message, Submits)


async def test_what_nobody_has_seen_runs_on_another_replica_once(world: World) -> None:
    world.submit(*range(20))
    world.step()
    expected = World(1)
    expected.submit(*range(20))
    expected.step(4)
    world.lose(0)
    assert world.outstanding[0] == 0
    world.engine.direct.check()
    world.step(4)
    assert sorted(world.owner.ended) == [*range(20)]
    assert not world.owner.failed
    assert world.owner.tokens == expected.owner.tokens
    world.engine.direct.check()


async def test_a_deadline_is_that_of_the_first_try(world: World) -> None:
    world.owner.account.timeout = 0.2
    world.submit(*range(20))
    await asyncio.sleep(0.15)
    world.lose(0)
    await asyncio.sleep(0.1)
    assert world.owner.failed.keys() == {*range(20)}
    assert "limits.request_timeout" in world.owner.failed[0]
    world.engine.direct.check()


async def test_what_was_seen_in_part_fails(world: World) -> None:
    world.submit(*range(20), stream=True)
    world.step()
    on_first = len(world.schedulers[0].requests)
    world.lose(0)
    assert len(world.owner.failed) == on_first
    assert "replica 0" in next(iter(world.owner.failed.values()))
    world.step(4)
    assert len(world.owner.ended) == 20 - on_first
    assert world.outstanding == [0, 0]
    assert not world.engine.busy
    world.engine.direct.check()


async def test_a_second_loss_fails_them(world: World) -> None:
    world.submit(*range(20))
    world.lose(0)
    world.schedulers[0].start(world.engine.on_messages)
    world.lose(1)
    assert len(world.owner.failed) + world.engine.num_requests == 20
    assert world.owner.failed
    world.step(4)
    assert len(world.owner.failed) + len(world.owner.ended) == 20


async def test_without_another_replica_all_fail() -> None:
    world = World(1)
    world.submit(1, 2)
    world.lose(0)
    assert world.owner.failed.keys() == {1, 2}
    assert not world.engine.busy


async def test_cancelled_requests_say_nothing_more_even_when_their_slots_are_used_again() -> None:
    world = World(1, max_requests=2)
    world.submit(1, 2)
    (scheduler,) = world.schedulers
    scheduler.step()
    old = list(scheduler.requests)
    assert world.engine.direct.cancel(world.owner, np.asarray([1, 7])).tolist() == [1]
    world.submit(3)
    late = Tokens(
        request_ids=i32_column(old),
        samples=i32_column([0, 0]),
        counts=i32_column([1, 1]),
        reasons=i32_column([Reason.LENGTH] * 2),
        token_ids=i32_column([8, 9]),
    )
    world.engine.on_messages([late])
    assert world.owner.tokens == {(2, 0): [9]}
    assert world.owner.ended == [2]
    assert world.engine.num_requests == 1


async def test_an_owner_that_leaves_takes_its_requests_along_and_no_others(world: World) -> None:
    other = Listener(number=2)
    world.submit(1, 2, 3)
    prompt = np.arange(5, dtype=np.int32)
    world.engine.submit_direct(jobs([1], [prompt], 1, 2, False), other)
    world.engine.direct.leave(world.owner)
    world.step(4)
    assert not world.owner.tokens
    assert other.ended == [1]
    assert not world.engine.busy


async def test_requests_of_http_and_direct_ones_in_one_message() -> None:
    world = World(1)
    world.submit(1, 2)
    job = EngineRequest(
        prompt=np.arange(4, dtype=np.int32),
        n=1,
        max_tokens=3,
        seed=1,
        sampling=SamplingParams(),
        stream=False,
        priority=0,
    )
    with world.engine.submitted([job]) as batch:
        world.submit(3)
        world.step(4)
        await batch.finished()
        assert batch.flights[0].samples[0].num_tokens == 3
        assert batch.flights[0].num_cached == 0
    assert sorted(world.owner.ended) == [1, 2, 3]


async def test_the_scheduler_can_refuse_one() -> None:
    world = World(1)
    world.submit(1, 2)
    (scheduler,) = world.schedulers
    scheduler.step()
    world.engine.on_messages([Failed(request_id=min(scheduler.requests), message="too long")])
    assert world.owner.failed == {1: "too long"}
    world.step(4)
    assert world.owner.ended == [2]


async def test_all_fail_when_the_engine_stops(world: World) -> None:
    world.submit(1, 2)
    world.engine.fail_all("the end")
    assert world.owner.failed.keys() == {1, 2}
    assert not world.engine.busy


async def test_there_is_a_limit_and_all_or_none_are_taken() -> None:
    world = World(1, max_requests=3)
    world.submit(1, 2)
    with pytest.raises(OverloadedError):
        world.submit(3, 4)
    assert world.engine.num_requests == 2


async def test_metrics_count_them(world: World) -> None:
    world.submit(1, 2, n=2)
    world.step(4)
    text = world.engine.metrics.text().decode()
    assert 'toka:request_success_total{finished_reason="length"} 4.0' in text
    assert "toka:prompt_tokens_total 40.0" in text
    assert "toka:e2e_request_latency_seconds_count 2.0" in text
    assert "toka:time_to_first_token_seconds_count 2.0" in text
