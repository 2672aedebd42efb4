"""The table of requests within the engine, over replicas that are stepped by hand and that can be lost."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest

from tests.cases.requests import make_prompt, make_requests, tokens_by_sample
from tests.fakes.scheduler import READY, FakeScheduler
from toka_async.arrays import Int64, f32_column, i32_column
from toka_async.messages import Failed, Prefilled, Reason, Submits, Tokens
from toka_async.server.engine.engine import Engine
from toka_async.server.engine.token_block import MOST_LISTED, Score, TokenBlock
from toka_async.server.limits.account import Account
from toka_async.server.limits.jobs import OverloadedError


@dataclass(eq=False)
class Listener:
    """A sink that keeps what it is told."""

    account: Account | None = None
    tokens: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    ended: list[int] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    forgets: bool = False
    may_take: bool = True
    takes: bool = False
    offered: list[list[int]] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)

    def on_tokens(self, block: TokenBlock) -> None:
        for place, ids in tokens_by_sample(block).items():
            self.tokens.setdefault(place, []).extend(ids)
        self.cached |= dict(zip(block.keys.tolist(), block.cached.tolist(), strict=True))
        self.ended += block.keys[block.is_last != 0].tolist()

    @property
    def takes_offers(self) -> bool:
        return self.may_take

    def offer(self, token_ids: list[int], scores: list[Score]) -> bool:
        self.offered.append(token_ids)
        self.scores += scores
        return self.takes

    def on_prompt(self, key: int, prefilled: Prefilled) -> None:
        raise NotImplementedError

    def on_failed(self, keys: Int64, error: Exception) -> None:
        self.failed |= dict.fromkeys(keys.tolist(), str(error))

    def forget(self, keys: Int64) -> bool:
        for key, sample in [*self.tokens] if self.forgets else []:
            if key in keys:
                del self.tokens[key, sample]
        return self.forgets


class World:
    """An engine and its replicas' fake schedulers."""

    def __init__(self, num_replicas: int = 2, max_requests: int = 99) -> None:
        self.schedulers = [self.scheduler(replica) for replica in range(num_replicas)]
        self.engine = Engine(self.schedulers, max_requests)
        self.sink = Listener()
        self.timeout = 0.0
        for scheduler in self.schedulers:
            scheduler.start(self.engine.on_messages)

    @staticmethod
    def scheduler(replica: int, life: int = 0) -> FakeScheduler:
        return FakeScheduler(held=True, ready=msgspec.structs.replace(READY, replica=replica, life=life))

    def submit(self, *ids: int, n: int = 1, max_tokens: int = 3, stream: bool = False, length: int = 20) -> None:
        prompts = [make_prompt(key, length) % 300 for key in ids]
        requests = make_requests(*prompts, keys=ids, n=n, max_tokens=max_tokens, stream=stream)
        self.engine.submit(requests, self.sink, self.timeout)

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


@pytest.fixture
async def world() -> World:
    return World()


async def test_requests_go_to_both_replicas_and_come_back_under_their_own_ids(world: World) -> None:
    world.submit(*range(100, 120), n=2)
    assert all(world.outstanding)
    assert world.engine.num_requests == 20
    world.step(4)
    assert sorted(world.sink.ended) == [*range(100, 120)]
    assert {len(tokens) for tokens in world.sink.tokens.values()} == {3}
    assert len(world.sink.tokens) == 40
    assert set(world.sink.cached.values()) == {16}
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
    world.engine.requests.check()
    world.step(4)
    assert sorted(world.sink.ended) == [*range(20)]
    assert not world.sink.failed
    assert world.sink.tokens == expected.sink.tokens
    world.engine.requests.check()


async def test_a_deadline_is_that_of_the_first_try(world: World) -> None:
    world.timeout = 0.2
    world.submit(*range(20))
    await asyncio.sleep(0.15)
    world.lose(0)
    await asyncio.sleep(0.1)
    assert world.sink.failed.keys() == {*range(20)}
    assert "limits.request_timeout" in world.sink.failed[0]
    world.engine.requests.check()


async def test_what_its_sink_forgets_runs_again_though_tokens_had_come(world: World) -> None:
    """Also where some samples have ended, since no client has seen them."""
    world.sink.forgets = True
    world.schedulers[0].script = lambda _, sample: [5] * (1 if sample else 3)
    world.schedulers[1].script = lambda *_: [7] * 3
    world.submit(1, n=4)
    world.step()
    assert len(world.sink.tokens) == 3
    lost = world.schedulers[0]
    world.lose(0)
    world.engine.requests.check()
    for _ in range(3):
        lost.step()  # what it had sent before its end still comes
        world.step()
    assert world.sink.tokens == {(1, sample): [7] * 3 for sample in range(4)}


async def test_what_was_seen_in_part_fails(world: World) -> None:
    world.submit(*range(20), stream=True)
    world.step()
    on_first = len(world.schedulers[0].requests)
    world.lose(0)
    assert len(world.sink.failed) == on_first
    assert "replica 0" in next(iter(world.sink.failed.values()))
    world.step(4)
    assert len(world.sink.ended) == 20 - on_first
    assert world.outstanding == [0, 0]
    assert not world.engine.busy
    world.engine.requests.check()


async def test_a_second_loss_fails_them(world: World) -> None:
    world.submit(*range(20))
    world.lose(0)
    world.schedulers[0].start(world.engine.on_messages)
    world.lose(1)
    assert len(world.sink.failed) + world.engine.num_requests == 20
    assert world.sink.failed
    world.step(4)
    assert len(world.sink.failed) + len(world.sink.ended) == 20


async def test_without_another_replica_all_fail() -> None:
    world = World(1)
    world.submit(1, 2)
    world.lose(0)
    assert world.sink.failed.keys() == {1, 2}
    assert not world.engine.busy


async def test_cancelled_requests_say_nothing_more_even_when_their_slots_are_used_again() -> None:
    world = World(1, max_requests=2)
    world.submit(1, 2)
    (scheduler,) = world.schedulers
    scheduler.step()
    old = list(scheduler.requests)
    assert world.engine.requests.cancel(world.sink, np.asarray([1, 7])).tolist() == [1]
    world.submit(3)
    late = Tokens(
        request_ids=i32_column(old),
        samples=i32_column([0, 0]),
        counts=i32_column([1, 1]),
        reasons=i32_column([Reason.LENGTH] * 2),
        token_ids=i32_column([8, 9]),
    )
    world.engine.on_messages([late])
    assert world.sink.tokens == {(2, 0): [9]}
    assert world.sink.ended == [2]
    assert world.engine.num_requests == 1


async def test_an_owner_that_leaves_takes_its_requests_along_and_no_others(world: World) -> None:
    other = Listener()
    world.submit(1, 2, 3)
    world.engine.submit(make_requests(make_prompt(), keys=[1]), other)
    world.engine.requests.cancel(world.sink)
    world.step(4)
    assert not world.sink.tokens
    assert other.ended == [1]
    assert not world.engine.busy


async def test_each_sink_gets_its_own_rows_of_a_message() -> None:
    world, others = World(1), [Listener() for _ in range(3)]
    world.submit(1, 2)
    for key, other in enumerate(others):
        world.engine.submit(make_requests(make_prompt(key), keys=[key], n=2), other)
    world.submit(3)
    (scheduler,) = world.schedulers
    scheduler.step()
    request_ids = [*scheduler.requests] * 2  # a sink's rows do not follow each other
    world.engine.on_messages(
        [
            Tokens(
                request_ids=i32_column(request_ids),
                samples=i32_column([0] * 6 + [1] * 6),
                counts=i32_column([2] * 12),
                reasons=i32_column([0] * 12),
                token_ids=i32_column(range(24)),
            )
        ]
    )
    assert world.sink.tokens == {(1, 0): [0, 1], (2, 0): [2, 3], (3, 0): [10, 11]} | {
        (1, 1): [12, 13],
        (2, 1): [14, 15],
        (3, 1): [22, 23],
    }
    for key, other in enumerate(others):
        assert other.tokens == {(key, 0): [4 + 2 * key, 5 + 2 * key], (key, 1): [16 + 2 * key, 17 + 2 * key]}


@pytest.mark.parametrize("takes", [False, True])
async def test_tokens_of_a_lone_sample_that_goes_on_are_offered(takes: bool) -> None:
    """The first sink has two samples, the second's ends, and the last says whether it takes what it is offered."""
    world, others = World(1), [Listener(takes=True), Listener(takes=True), Listener(takes=takes)]
    for key, (other, n) in enumerate(zip(others, [2, 1, 1], strict=True)):
        world.engine.submit(make_requests(make_prompt(key), keys=[key], n=n), other)
    (scheduler,) = world.schedulers
    scheduler.step()
    first, second, third = scheduler.requests
    message = Tokens(
        request_ids=i32_column([first, second, first, third]),
        samples=i32_column([0, 0, 1, 0]),
        counts=i32_column([1, 2, 1, 2]),
        reasons=i32_column([0, int(Reason.LENGTH), 0, 0]),
        token_ids=i32_column(range(6)),
    )
    world.engine.on_messages([message])
    assert [other.offered for other in others] == [[], [], [[4, 5]]]
    assert others[0].tokens == {(0, 0): [0], (0, 1): [3]}
    assert others[1].tokens == {(1, 0): [1, 2]}
    assert others[2].tokens == ({} if takes else {(2, 0): [4, 5]})


async def test_only_sinks_that_take_offers_get_any() -> None:
    world, others = World(1), [Listener(takes=True), Listener(may_take=False), Listener(takes=True)]
    for key, other in enumerate(others):
        world.engine.submit(make_requests(make_prompt(key), keys=[key]), other)
    (scheduler,) = world.schedulers
    scheduler.step()
    message = Tokens(
        request_ids=i32_column(scheduler.requests),
        samples=i32_column([0, 0, 0]),
        counts=i32_column([1, 2, 3]),
        reasons=i32_column([0, 0, 0]),
        token_ids=i32_column(range(6)),
        num_logprobs=0,
        logprobs=f32_column([-1.0, -2, -3, -4, -5, -6]),
    )
    world.engine.on_messages([message])
    assert [other.offered for other in others] == [[[0]], [], [[3, 4, 5]]]
    assert [logprob for logprob, _, _ in others[2].scores] == [-4, -5, -6]
    assert others[1].tokens == {(1, 0): [1, 2]}


async def test_a_lone_stream_is_offered_lists_unless_there_is_more() -> None:
    world = World(1)
    world.sink.takes = True
    world.submit(5)
    (scheduler,) = world.schedulers
    scheduler.step()
    message = Tokens(
        request_ids=i32_column(scheduler.requests),
        samples=i32_column([0]),
        counts=i32_column([1]),
        reasons=i32_column([0]),
        token_ids=i32_column([7]),
    )
    world.engine.on_messages([message])
    assert (world.sink.offered, world.sink.tokens) == ([[7]], {})
    scored = msgspec.structs.replace(
        message,
        num_logprobs=2,
        logprobs=f32_column([-1.0]),
        top_ids=i32_column([7, 8]),
        top_logprobs=f32_column([-1.0, -2.0]),
    )
    world.engine.on_messages([scored])
    assert (world.sink.offered, world.sink.tokens) == ([[7], [7]], {})
    assert world.sink.scores == [(-1.0, [7, 8], [-1.0, -2.0])]
    kept = msgspec.structs.replace(scored, kept=i32_column([3]), masses=f32_column([0.5]))
    many = msgspec.structs.replace(
        scored,
        num_logprobs=MOST_LISTED + 1,
        top_ids=i32_column(range(MOST_LISTED + 1)),
        top_logprobs=f32_column([-1.0] * (MOST_LISTED + 1)),
    )
    world.engine.on_messages([kept, many])
    assert (len(world.sink.offered), world.sink.tokens) == (2, {(5, 0): [7, 7]})


async def test_requests_count_in_their_sinks_account() -> None:
    world, account = World(1), Account("somebody")
    world.submit(9)
    assert world.engine.requests.num_accounted == 0
    world.sink.account = account
    world.submit(1, 2, n=2)
    assert (account.num_requests, account.num_tokens) == (2, 2 * (20 + 2 * 3))
    assert world.engine.requests.num_accounted == 2


async def test_the_scheduler_can_refuse_one() -> None:
    world = World(1)
    world.submit(1, 2)
    (scheduler,) = world.schedulers
    scheduler.step()
    world.engine.on_messages([Failed(request_id=min(scheduler.requests), message="too long")])
    assert world.sink.failed == {1: "too long"}
    world.step(4)
    assert world.sink.ended == [2]


async def test_all_fail_when_the_engine_stops(world: World) -> None:
    world.submit(1, 2)
    world.engine.fail_all("the end")
    assert world.sink.failed.keys() == {1, 2}
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
