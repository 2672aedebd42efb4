"""The simulated rank beside a rank of pages: the same rows in the same order, whatever the core does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.drivers.core import CoreDriver
from tests.drivers.page_rank import PageRank, submit
from toka_async.arrays import as_f32, as_i32, as_i64, column, i32_column
from toka_async.checkpoint.hub import resolve_model
from toka_async.checkpoint.spec import ModelError, read_spec
from toka_async.config import CacheConfig, ModelConfig, ScheduleConfig, SimulatedConfig
from toka_async.messages import Prompt, Ready, Step, StepDone, TokenSampling
from toka_async.startup.simulated import SimulatedRank, make_simulated_ready

VOCAB = 23


def ready(**fields: int) -> Ready:
    values: dict[str, Any] = {"num_pages": 40, "page_size": 4, "max_seqs": 6, "max_context": 64, "vocab_size": VOCAB}
    return Ready(**(values | fields))


@dataclass(slots=True)
class Clock:
    """Time that passes when somebody sleeps."""

    now: float = 10.0
    slept: list[float] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class Pair:
    """Runs each step on both ranks and compares what must be the same."""

    def __init__(self) -> None:
        self.pages = PageRank(ready())
        self.simulated = SimulatedRank(ready(), SimulatedConfig(end_rate=0.2))

    def run(self, step: Step) -> StepDone:
        expected, done = self.pages.run(step), self.simulated.run(step)
        assert self.simulated._order.tolist() == self.pages.order.tolist()
        for slot, row in self.pages.rows.items():
            assert self.simulated._positions[slot] == row.position
        assert done.step_id == expected.step_id
        assert len(done.token_ids) == len(expected.token_ids)
        wanted = bool(done.logprobs)
        assert len(done.logprobs) == (len(done.token_ids) if wanted else 0)
        assert [bytes(done.top_rows), bytes(done.top_counts)] == [bytes(expected.top_rows), bytes(expected.top_counts)]
        assert len(done.top_ids) == len(done.top_logprobs) == len(expected.top_ids)
        shapes = [(c.slot, c.start, len(c.logprobs), c.num_top, len(c.top_ids)) for c in done.prompts]
        of_pages = [(c.slot, c.start, len(c.logprobs), c.num_top, len(c.top_ids)) for c in expected.prompts]
        assert shapes == [shape for shape in of_pages if shape[2]]
        return expected


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_rows_are_those_of_a_real_rank(data: st.DataObject) -> None:
    driver = CoreDriver(ready(), max_tokens=12, rank=Pair(), until_full=data.draw(st.booleans()))
    for request_id in range(data.draw(st.integers(1, 5))):
        sampling = TokenSampling(
            end_ids=i32_column(data.draw(st.lists(st.integers(0, 30), max_size=3))),
            num_logprobs=data.draw(st.integers(-1, 2)),
            num_prompt_logprobs=data.draw(st.integers(-1, 2)),
        )
        prompt = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=14))
        max_tokens = data.draw(st.integers(0, 9))
        n = data.draw(st.integers(1, 5))
        driver.submit(submit(request_id, prompt, n=n, max_tokens=max_tokens, sampling=sampling))
        for _ in range(data.draw(st.integers(0, 4))):
            driver.turn()
        if data.draw(st.booleans()) and data.draw(st.booleans()):
            driver.cancel(request_id)
    driver.drain()


def started(
    rank: SimulatedRank, num_rows: int, sampling: TokenSampling, num_prompt: int = 5, first_seed: int = 0
) -> None:
    """Rows of one prompt that decode from the next step on; this one samples their first tokens."""
    slots = np.arange(num_rows, dtype=np.int32)
    prompt = Prompt(
        key=0,
        token_ids=i32_column(range(num_prompt)),
        num_prompt=num_prompt,
        pages=column(slots[:0]),
        sampling=sampling,
    )
    rank.run(
        Step(
            step_id=0,
            prompts=(prompt,),
            admit_slots=column(slots),
            admit_keys=column(np.zeros_like(slots)),
            admit_starts=column(np.full_like(slots, num_prompt - 1)),
            admit_seeds=column(np.arange(first_seed, first_seed + num_rows, dtype=np.int64)),
            joined=column(slots),
        )
    )


def tokens(rank: SimulatedRank, num_steps: int) -> np.ndarray:
    """[steps, rows]"""
    return np.stack([as_i32(rank.run(Step(step_id=1 + i)).token_ids) for i in range(num_steps)])


@pytest.mark.parametrize("end_rate", [0.0, 0.01, 0.3, 1.0])
def test_ends_come_at_their_rate(end_rate: float) -> None:
    rank = SimulatedRank(ready(max_seqs=2000, vocab_size=50), SimulatedConfig(end_rate=end_rate))
    started(rank, 2000, TokenSampling(end_ids=i32_column([3, 4, 7, 1000])))
    drawn = tokens(rank, 20)
    ends = np.isin(drawn, [3, 4, 7])
    assert ((drawn >= 0) & (drawn < 50)).all()
    assert ends.mean() == pytest.approx(end_rate, abs=4 * (0.25 / drawn.size) ** 0.5)
    if end_rate:
        counts = np.bincount(drawn[ends])[[3, 4, 7]]
        assert counts.min() > 0.8 * counts.mean()
    if end_rate < 1:
        assert np.unique(drawn[~ends]).size == 47


def test_rows_without_ends_never_end_and_min_tokens_holds() -> None:
    simulated = SimulatedConfig(end_rate=1.0)
    rank = SimulatedRank(ready(max_seqs=100, vocab_size=50), simulated)
    started(rank, 100, TokenSampling())
    assert np.unique(tokens(rank, 20)).size == 50
    rank = SimulatedRank(ready(max_seqs=100, vocab_size=50), simulated)
    started(rank, 100, TokenSampling(end_ids=i32_column([9]), min_tokens=4))
    assert (tokens(rank, 6) == 9).all(axis=1).tolist() == [False, False, False, True, True, True]


def test_a_token_depends_on_seed_and_position_alone() -> None:
    many, one = (SimulatedRank(ready(max_seqs=8), SimulatedConfig()) for _ in range(2))
    started(many, 8, TokenSampling())
    started(one, 1, TokenSampling(), first_seed=5)
    assert tokens(many, 30)[:, 5].tolist() == tokens(one, 30)[:, 0].tolist()


def test_logprobs_could_be_real() -> None:
    rank = SimulatedRank(ready(), SimulatedConfig())
    started(rank, 3, TokenSampling(num_logprobs=4))
    done = rank.run(Step(step_id=1))
    chosen, ids = as_i32(done.token_ids), as_i32(done.top_ids).reshape(3, 4)
    top = as_f32(done.top_logprobs).reshape(3, 4)
    assert (ids[:, 0] == chosen).all()
    assert (top[:, 0] == as_f32(done.logprobs)).all()
    assert all(np.unique(row).size == 4 for row in ids)
    assert (np.diff(top) < 0).all()
    assert (np.exp(top).sum(axis=1) < 1).all()


def test_a_queued_step_starts_when_the_one_before_it_ends() -> None:
    clock = Clock()
    rank = SimulatedRank(ready(), SimulatedConfig(step_ms=40), lambda: clock.now, clock.sleep)
    assert rank.run(Step(step_id=0)).seconds == pytest.approx(0.04)
    clock.now += 0.01  # woken late
    rank.run(Step(step_id=1))
    assert clock.slept == pytest.approx([0.04, 0.03])
    clock.now += 0.01
    rank.wait()
    rank.run(Step(step_id=2))
    assert clock.slept[2] == pytest.approx(0.04)


def test_a_step_that_takes_longer_is_not_slept_for() -> None:
    clock = Clock()

    def slow() -> float:
        clock.now += 1.0
        return clock.now

    rank = SimulatedRank(ready(), SimulatedConfig(step_ms=1), slow, clock.sleep)
    assert rank.run(Step(step_id=0)).seconds >= 1.0
    assert clock.slept == []


def test_what_fits() -> None:
    spec = read_spec(resolve_model("demo"))
    auto = make_simulated_ready(spec, ModelConfig(), CacheConfig(), ScheduleConfig())
    assert (auto.max_seqs, auto.max_tokens, auto.max_context) == (8192, 32768, spec.max_context)
    assert auto.num_pages == 8192 * spec.max_context // 16
    wide = make_simulated_ready(spec, ModelConfig(max_context=100_000), CacheConfig(), ScheduleConfig(max_seqs=2))
    assert (wide.max_context, wide.num_pages) == (8192, 512)
    small = make_simulated_ready(spec, ModelConfig(), CacheConfig(num_tokens=100), ScheduleConfig(max_seqs=4))
    assert (small.num_pages, small.max_context, small.vocab_size) == (6, 96, spec.vocab_size)
    with pytest.raises(ModelError, match=r"cache.num_tokens=3"):
        make_simulated_ready(spec, ModelConfig(), CacheConfig(num_tokens=3), ScheduleConfig())


def test_seeds_are_read_as_they_are_sent() -> None:
    rank = SimulatedRank(ready(), SimulatedConfig())
    started(rank, 2, TokenSampling(), first_seed=-1)
    assert rank._seeds[:2].view(np.int64).tolist() == as_i64(column(np.array([-1, 0]))).tolist()


def test_a_step_takes_longer_for_its_tokens_and_keys() -> None:
    """A prefix that a group shares is read once."""
    clock, times = Clock(), SimulatedConfig(step_ms=3, token_us=500, key_ns=1000)
    rank = SimulatedRank(ready(), times, lambda: clock.now, clock.sleep)
    prompt = Prompt(
        key=0, token_ids=i32_column(range(9)), num_prompt=9, pages=i32_column([0, 1]), sampling=TokenSampling()
    )
    slots = i32_column([0, 1])
    first = Step(
        step_id=0,
        prompts=(prompt,),
        admit_slots=slots,
        admit_keys=i32_column([0, 0]),
        admit_starts=i32_column([0, 0]),
        admit_seeds=column(np.zeros(2, np.int64)),
        chunk_slots=slots,
        chunk_lengths=i32_column([9, 4]),
        chunk_samples=column(np.asarray([True, False])),
    )
    assert rank.run(first).seconds == pytest.approx(0.003 + 13 * 0.0005)
    alone = Step(step_id=1, joined=i32_column([0, 1]))
    assert rank.run(alone).seconds == pytest.approx(0.003 + 2 * 0.0005 + (10 + 5) * 1e-6)
    ones = i32_column([1])
    shared = Step(step_id=2, group_starts=i32_column([0]), group_rows=i32_column([2]), group_pages=ones)
    assert rank.run(shared).seconds == pytest.approx(0.003 + 2 * 0.0005 + (11 + 6 - 4) * 1e-6)
