"""The engine with two replicas, stepped by hand: where requests go, and what becomes of them when one is lost."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest

from tests.fakes.scheduler import READY, FakeScheduler
from toka_async.messages import Cancel, DropStop, Ready, SamplingParams, Stats, StopMask, Submit
from toka_async.server.engine import replicas
from toka_async.server.engine.engine import Engine
from toka_async.server.engine.inflight import EngineStoppedError
from toka_async.server.limits.jobs import EngineRequest, NotServingError

MASK = StopMask(stop_id=0, mask=memoryview(bytes(400)), window=2)


class Pair:
    """An engine and the fake schedulers of its replicas; `revive` is a replica's next life."""

    def __init__(self) -> None:
        self.schedulers = [self.scheduler(0), self.scheduler(1)]
        self.engine = Engine(self.schedulers, max_requests=99)
        self.lives = [0, 0]
        for scheduler in self.schedulers:
            scheduler.start(self.engine.on_messages)

    @staticmethod
    def scheduler(replica: int, life: int = 0) -> FakeScheduler:
        return FakeScheduler(held=True, ready=msgspec.structs.replace(READY, replica=replica, life=life))

    def lose(self, replica: int) -> FakeScheduler:
        """Returns what was lost."""
        lost = self.schedulers[replica]
        self.lives[replica] += 1
        self.schedulers[replica] = self.scheduler(replica, self.lives[replica])
        self.engine.lose(replica, self.lives[replica], "rank-0-0 was killed", self.schedulers[replica])
        return lost

    def revive(self, replica: int) -> None:
        self.schedulers[replica].start(self.engine.on_messages)

    def step(self) -> None:
        for scheduler in self.schedulers:
            scheduler.step()

    @property
    def outstanding(self) -> list[int]:
        return self.engine.replicas.router.outstanding

    def submitted(self, replica: int) -> list[int]:
        return [message.request_id for message in self.schedulers[replica].log if isinstance(message, Submit)]


def job(
    first: int = 0, n: int = 1, max_tokens: int = 3, stream: bool = False, in_blocks: bool = False
) -> EngineRequest:
    return EngineRequest(
        prompt=np.arange(first, first + 40, dtype=np.int32),
        n=n,
        max_tokens=max_tokens,
        seed=1,
        sampling=SamplingParams(),
        stream=stream,
        priority=0,
        in_blocks=in_blocks,
    )


@pytest.fixture
async def pair() -> Pair:
    return Pair()


async def test_requests_are_spread_and_tokens_come_back(pair: Pair) -> None:
    with pair.engine.submitted([job(0, n=2), job(50), job(100)]) as batch:
        assert pair.outstanding == [46, 86]
        pair.step()
        assert (pair.submitted(0), pair.submitted(1)) == ([0], [1, 2])
        pair.step()
        pair.step()
        await asyncio.wait_for(batch.finished(), 60)
    assert pair.outstanding == [0, 0]
    assert [sample.num_tokens for flight in batch.flights for sample in flight.samples] == [3, 3, 3, 3]


async def test_a_prompt_goes_where_it_was(pair: Pair) -> None:
    for replica in (0, 1):
        for _ in range(2):
            with pair.engine.submitted([job(50 * replica), *([job(50)] if not replica else [])]):
                for _ in range(3):
                    pair.step()
    assert pair.submitted(1) == [1, 3, 4, 5]


async def test_samples_that_end_count_no_more(pair: Pair) -> None:
    pair.schedulers[0].script = lambda _, sample: [5] * (1 + sample)
    with pair.engine.submitted([job(n=3, max_tokens=10)]):
        assert pair.outstanding == [70, 0]
        seen = []
        for _ in range(3):
            pair.step()
            seen.append(pair.outstanding[0])
    assert seen == [20, 10, 0]


async def test_all_must_be_ready_and_the_smallest_limits_count() -> None:
    engine = Engine([FakeScheduler(held=True), FakeScheduler(held=True)], 9)
    engine.on_messages([READY])
    with pytest.raises(NotServingError, match="starting"):
        engine.check_serving()
    engine.on_messages([msgspec.structs.replace(READY, replica=1, num_pages=200, max_context=600)])
    ready = engine.check_serving()
    assert (ready.num_pages, ready.max_context) == (200, 512)
    engine.check_whole()


@pytest.mark.parametrize("in_blocks", [False, True])
async def test_a_lost_replicas_requests_are_answered_by_another(pair: Pair, in_blocks: bool) -> None:
    """Also one of which some samples had come, since its client has seen nothing."""
    pair.schedulers[0].script = lambda _, sample: [5] * (1 if sample else 3)
    pair.schedulers[1].script = lambda *_: [7] * 3
    with pair.engine.submitted([job(n=4, in_blocks=in_blocks)]) as batch:
        pair.step()
        lost = pair.lose(0)
        for _ in range(3):
            lost.step()  # what it had sent before its end still comes
            pair.step()
        await asyncio.wait_for(batch.finished(), 60)
        (flight,) = batch.flights
        if in_blocks:
            assert flight.take_block().token_ids.tolist() == [7] * 12
        else:
            assert [sample.take().token_ids.tolist() for sample in flight.samples] == [[7, 7, 7]] * 4
    assert pair.submitted(1) == [1]
    assert pair.outstanding == [0, 0]
    assert not pair.engine.busy


@pytest.mark.parametrize("num_steps", [0, 1])
async def test_a_stream_goes_on_elsewhere_only_unseen(pair: Pair, num_steps: int) -> None:
    with pair.engine.submitted([job(stream=True)]) as batch:
        for _ in range(num_steps):
            pair.step()
        pair.lose(0)
        pair.step()
        if num_steps:
            await batch.news()
            with pytest.raises(EngineStoppedError, match="replica 0 has stopped: rank-0-0 was killed"):
                await batch.news()
            assert pair.engine.num_requests == 0
        else:
            assert len(await batch.news()) == 1
            pair.step()
            pair.step()
            assert batch.flights[0].samples[0].num_tokens == 3
    assert pair.outstanding == [0, 0]


async def test_a_request_is_tried_twice_at_most(pair: Pair) -> None:
    with pair.engine.submitted([job()]) as batch:
        pair.lose(0)
        pair.revive(0)
        pair.lose(1)
        with pytest.raises(EngineStoppedError, match="replica 1"):
            await batch.finished()
    assert pair.outstanding == [0, 0]


async def test_with_nobody_left_requests_end_and_new_ones_are_refused(pair: Pair) -> None:
    with pair.engine.submitted([job(), job(50)]) as batch:
        pair.lose(1)
        pair.lose(0)
        with pytest.raises(EngineStoppedError):
            await batch.finished()
    with pytest.raises(NotServingError, match="every replica is being restarted: rank-0-0 was killed"):
        pair.engine.check_serving()
    pair.revive(0)
    pair.engine.check_serving()
    with pytest.raises(NotServingError, match="replica 1 is being restarted"):
        pair.engine.check_whole()
    pair.revive(1)
    pair.engine.check_whole()


async def test_a_retried_request_can_be_cancelled(pair: Pair) -> None:
    def leave() -> None:
        with pair.engine.submitted([job()]):
            pair.lose(0)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        leave()
    pair.step()
    assert [message.request_id for message in pair.schedulers[1].log if isinstance(message, Cancel)] == [1]
    assert not pair.engine.busy


async def test_a_late_word_of_an_earlier_life_is_ignored(pair: Pair) -> None:
    pair.lose(0)
    pair.engine.on_messages([msgspec.structs.replace(READY, replica=0), Stats(num_running=5)])
    assert pair.engine.replicas.live == [1]
    assert pair.engine.stats.num_running == 0


async def test_counters_never_fall(pair: Pair) -> None:
    with pair.engine.submitted([job(), job(50)]):
        for _ in range(3):
            pair.step()
    pair.engine.on_messages([Stats(generated_tokens=10), Stats(generated_tokens=4, replica=1)])
    pair.lose(0)
    pair.revive(0)
    pair.engine.on_messages([Stats(generated_tokens=1, num_running=2, replica=0, life=1)])
    assert (pair.engine.stats.generated_tokens, pair.engine.stats.num_running) == (15, 2)
    value = pair.engine.metrics.registry.get_sample_value
    assert value("toka:replica_generation_tokens_total", {"replica": "0"}) == 11
    assert value("toka:replica_restarts_total", {"replica": "0"}) == 1
    assert value("toka:replica_up", {"replica": "0"}) == 1
    assert value("toka:replica_requests_running", {"replica": "0"}) == 2


async def test_stop_sets_go_to_all_and_again_to_one_that_is_back(pair: Pair) -> None:
    pair.engine.tell_all(MASK)
    pair.lose(0)
    pair.engine.tell_all(msgspec.structs.replace(MASK, stop_id=1))
    pair.engine.tell_all(DropStop(stop_id=0))
    pair.step()
    assert (list(pair.schedulers[0].masks), list(pair.schedulers[1].masks)) == ([], [1])
    pair.revive(0)
    pair.step()
    assert list(pair.schedulers[0].masks) == [1]


def test_ready_is_of_the_first_life_of_the_first_replica_by_default() -> None:
    ready = Ready(num_pages=1, page_size=1, max_seqs=1, max_context=1, vocab_size=1)
    assert (ready.replica, ready.life) == (0, 0)


async def test_those_who_look_are_told_what_runs_now(pair: Pair) -> None:
    with pair.engine.submitted([job(), job(50)]):
        pair.step()
        pair.engine.on_messages([Stats(), Stats(replica=1)])
        assert pair.engine.stats.num_running == 0
        await asyncio.gather(pair.engine.replicas.refresh(), pair.engine.replicas.refresh())
        assert pair.engine.stats.num_running == 2
        assert [scheduler.asked for scheduler in pair.schedulers] == [1, 1]  # they share the answer
        await pair.engine.replicas.refresh()
        assert [scheduler.asked for scheduler in pair.schedulers] == [2, 2]
        pair.engine.fail_all("the test is over")


async def test_nobody_waits_long_for_one_that_does_not_answer(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "ASK_SECONDS", 0.01)
    pair.schedulers[0].silent = True
    for _ in range(2):
        await pair.engine.replicas.refresh()
    assert [scheduler.asked for scheduler in pair.schedulers] == [1, 1]  # and nothing piles up at it
    monkeypatch.setattr(replicas, "ASK_SECONDS", 60.0)
    waiting = asyncio.create_task(pair.engine.replicas.refresh())
    await asyncio.sleep(0)
    pair.lose(0)  # its answer will not come
    await waiting
    await pair.engine.replicas.refresh()
    assert pair.schedulers[1].asked == 2
    pair.lose(1)
    await pair.engine.replicas.refresh()  # there is nobody to ask
