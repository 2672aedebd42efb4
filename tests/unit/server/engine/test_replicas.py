"""The engine with two replicas, stepped by hand: where requests go, and what becomes of them when one is lost."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases.requests import make_prompt, make_requests, run_group
from tests.fakes.scheduler import READY, FakeScheduler
from toka_async.arrays import EMPTY, as_i64, column
from toka_async.messages import STEP_COSTS, DropStop, Ready, Stats, StopMask
from toka_async.server.engine import replicas
from toka_async.server.engine.engine import Engine
from toka_async.server.engine.replicas import keep_counters, merge_stats
from toka_async.server.engine.request_columns import RequestColumns
from toka_async.server.engine.request_group import EngineStoppedError
from toka_async.server.limits.jobs import NotServingError

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

    def submitted(self, replica: int) -> int:
        return len(self.schedulers[replica].submits)


def make_job(*firsts: int, n: int = 1, max_tokens: int = 3, stream: bool = False) -> RequestColumns:
    """One prompt of 40 tokens for each first one."""
    return make_requests(*(make_prompt(first, 40) for first in firsts), n=n, max_tokens=max_tokens, stream=stream)


@pytest.fixture
async def pair() -> Pair:
    return Pair()


async def test_requests_are_spread_and_tokens_come_back(pair: Pair) -> None:
    async with run_group(pair.engine, make_job(0, n=2)) as one, run_group(pair.engine, make_job(50, 100)) as two:
        assert pair.outstanding == [46, 86]
        for _ in range(3):
            pair.step()
        assert (pair.submitted(0), pair.submitted(1)) == (1, 2)
        blocks = [await asyncio.wait_for(group.finished(), 60) for group in (one, two)]
    assert pair.outstanding == [0, 0]
    assert [block.counts.tolist() for block in blocks] == [[3, 3], [3, 3]]


async def test_a_prompt_goes_where_it_was(pair: Pair) -> None:
    for firsts in ((0, 50), (0, 50), (50,), (50,)):
        async with run_group(pair.engine, make_job(*firsts)):
            for _ in range(3):
                pair.step()
    assert (pair.submitted(0), pair.submitted(1)) == (2, 4)


async def test_samples_that_end_count_no_more(pair: Pair) -> None:
    pair.schedulers[0].script = lambda _, sample: [5] * (1 + sample)
    async with run_group(pair.engine, make_job(0, n=3, max_tokens=10)):
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


async def test_a_lost_replicas_requests_are_answered_by_another(pair: Pair) -> None:
    """Also one of which some samples had come, since its client has seen nothing."""
    pair.schedulers[0].script = lambda _, sample: [5] * (1 if sample else 3)
    pair.schedulers[1].script = lambda *_: [7] * 3
    async with run_group(pair.engine, make_job(0, n=4)) as group:
        pair.step()
        lost = pair.lose(0)
        for _ in range(3):
            lost.step()  # what it had sent before its end still comes
            pair.step()
        block = await asyncio.wait_for(group.finished(), 60)
        assert block.tokens.token_ids.tolist() == [7] * 12
    assert pair.submitted(1) == 1
    assert pair.outstanding == [0, 0]
    assert not pair.engine.busy


@pytest.mark.parametrize("num_steps", [0, 1])
async def test_a_stream_goes_on_elsewhere_only_unseen(pair: Pair, num_steps: int) -> None:
    async with run_group(pair.engine, make_job(0, stream=True)) as group:
        for _ in range(num_steps):
            pair.step()
        pair.lose(0)
        pair.step()
        if num_steps:
            await group.news(9)
            with pytest.raises(EngineStoppedError, match="replica 0 has stopped: rank-0-0 was killed"):
                await group.news(9)
            assert pair.engine.num_requests == 0
        else:
            pair.step()
            pair.step()
            assert (await group.news(9)).counts.tolist() == [3]
    assert pair.outstanding == [0, 0]


async def test_a_request_is_tried_twice_at_most(pair: Pair) -> None:
    async with run_group(pair.engine, make_job(0)) as group:
        pair.lose(0)
        pair.revive(0)
        pair.lose(1)
        with pytest.raises(EngineStoppedError, match="replica 1"):
            await group.finished()
    assert pair.outstanding == [0, 0]


async def test_with_nobody_left_requests_end_and_new_ones_are_refused(pair: Pair) -> None:
    async with run_group(pair.engine, make_job(0, 50)) as group:
        pair.lose(1)
        pair.lose(0)
        with pytest.raises(EngineStoppedError):
            await group.finished()
    with pytest.raises(NotServingError, match="every replica is being restarted: rank-0-0 was killed"):
        pair.engine.check_serving()
    pair.revive(0)
    pair.engine.check_serving()
    with pytest.raises(NotServingError, match="replica 1 is being restarted"):
        pair.engine.check_whole()
    pair.revive(1)
    pair.engine.check_whole()


async def test_a_retried_request_can_be_cancelled(pair: Pair) -> None:
    async def leave() -> None:
        async with run_group(pair.engine, make_job(0)):
            pair.lose(0)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        await leave()
    pair.step()
    assert len(pair.schedulers[1].cancelled) == 1
    assert not pair.engine.busy


async def test_a_late_word_of_an_earlier_life_is_ignored(pair: Pair) -> None:
    pair.lose(0)
    pair.engine.on_messages([msgspec.structs.replace(READY, replica=0), Stats(num_running=5)])
    assert pair.engine.replicas.live == [1]
    assert pair.engine.stats.num_running == 0


async def test_counters_never_fall(pair: Pair) -> None:
    async with run_group(pair.engine, make_job(0, 50)):
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


async def test_each_replica_tells_what_its_steps_cost(pair: Pair) -> None:
    costs = (1e-3, 5e-6, 8e-9, 4e-10)
    pair.engine.on_messages([Stats(step_costs=costs, num_prompt_steps=3), Stats(num_prompt_steps=4, replica=1)])
    value = pair.engine.metrics.registry.get_sample_value
    found = [value("toka:replica_step_cost_seconds", {"replica": "0", "part": part}) for part in STEP_COSTS]
    assert found == list(costs)
    assert value("toka:replica_step_cost_seconds", {"replica": "1", "part": "step"}) is None
    assert value("toka:prompt_steps_total") == 7


async def test_stop_sets_go_to_all_and_again_to_one_that_is_back(pair: Pair) -> None:
    pair.engine.replicas.tell_all(MASK)
    pair.lose(0)
    pair.engine.replicas.tell_all(msgspec.structs.replace(MASK, stop_id=1))
    pair.engine.replicas.tell_all(DropStop(stop_id=0))
    pair.step()
    assert (list(pair.schedulers[0].masks), list(pair.schedulers[1].masks)) == ([], [1])
    pair.revive(0)
    pair.step()
    assert list(pair.schedulers[0].masks) == [1]


def test_ready_is_of_the_first_life_of_the_first_replica_by_default() -> None:
    ready = Ready(num_pages=1, page_size=1, max_seqs=1, max_context=1, vocab_size=1)
    assert (ready.replica, ready.life) == (0, 0)


async def test_those_who_look_are_told_what_runs_now(pair: Pair) -> None:
    async with run_group(pair.engine, make_job(0, 50)):
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


# ---- statistics of several replicas as one ---------------------------------------------------------------------------


def test_sums_worst_percentiles_and_mean_lengths() -> None:
    one = Stats(num_running=1, num_steps=3, step_seconds=0.5, depths=(1, 2), scheduler_us=(5.0, 6.0, 9.0))
    two = Stats(num_running=2, num_steps=4, depths=(1, 0, 4), scheduler_us=(1.0, 7.0, 8.0), expected_length=(0.5, 0.1))
    both = merge_stats([one, two])
    assert (both.num_running, both.num_steps, both.step_seconds) == (3, 7, 0.5)
    assert both.depths == (2, 2, 4)
    assert both.scheduler_us == (5.0, 7.0, 9.0)
    assert both.expected_length == (0.5, 0.1)
    assert merge_stats([one]) is one


def test_times_of_stages_are_summed_stage_by_stage() -> None:
    parts = [Stats(pipeline=((1.0, 0.5, 0.0), (2.0, 0.25, 0.5))), Stats(), Stats(pipeline=((3.0, 0.5, 1.0),))]
    assert merge_stats(parts).pipeline == ((4.0, 1.0, 1.0), (2.0, 0.25, 0.5))


def test_loads_of_experts_are_summed_layer_by_layer() -> None:
    one, two = (column(np.array(counts)) for counts in ([1, 2], [30, 40]))
    merged = merge_stats([Stats(expert_loads=(one, EMPTY, one)), Stats(), Stats(expert_loads=(two, EMPTY))])
    assert [as_i64(loads).tolist() for loads in merged.expert_loads] == [[31, 42], [], [1, 2]]


def test_what_stays_of_a_scheduler_that_is_gone() -> None:
    stats = Stats(
        num_running=3, pages_used=2, num_pages=9, generated_tokens=7, depths=(1,), scheduler_us=(1.0, 2.0, 3.0)
    )
    assert keep_counters(stats) == Stats(generated_tokens=7, depths=(1,))


@given(st.data())
def test_every_field_is_merge_stats(data: st.DataObject) -> None:
    """With nothing else, a replica's statistics stay what they are, whatever field is set."""
    labels = ("replica", "life", "answers", "forecast", "step_costs")
    names = [field.name for field in msgspec.structs.fields(Stats) if field.name not in labels]
    name = data.draw(st.sampled_from(names))
    value = {
        "depths": (1, 2),
        "token_gaps": (1, 2),
        "scheduler_us": (1.0, 2.0, 3.0),
        "forecast_us": (1.0, 2.0, 3.0),
        "stage_seconds": (0.5,),
        "expected_length": (0.5, 0.25),
        "pipeline": ((2.0, 0.5, 0.25), (3.0, 0.25, 0.125)),
        "expert_loads": (EMPTY, column(np.array([1, 2]))),
    }.get(name, 3)
    stats = msgspec.structs.replace(Stats(), **{name: value})
    assert merge_stats([stats, Stats()]) == stats
