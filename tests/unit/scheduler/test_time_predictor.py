from __future__ import annotations

import random
from collections import deque
from math import isfinite

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from toka_async.scheduler.step_budget import StepBudget, StepLimits, count_pairs
from toka_async.scheduler.time_predictor import (
    CHEAPEST,
    DEAREST,
    GAIN,
    LARGEST_ERROR,
    UNMEASURED,
    StepWork,
    TimePredictor,
)

Costs = tuple[float, float, float, float]  # of a step, a token, a key and a pair


def take(costs: Costs, work: StepWork) -> float:
    """The time of a step where it is as the predictor assumes."""
    return costs[0] + costs[1] * work.tokens + costs[2] * work.keys + costs[3] * work.pairs


def draw_work(draw: random.Random) -> StepWork:
    """Decoding rows, and prompts in half of the steps."""
    rows, chunk = draw.randint(1, 3000), draw.choice([0, draw.randint(1, 16_000)])
    return StepWork(rows + chunk, rows * draw.randint(100, 2000), count_pairs(draw.randint(0, 8000), chunk))


@pytest.mark.parametrize("guess", [5e-6, 0.0])
def test_steps_of_many_kinds_teach_what_each_part_costs(guess: float) -> None:
    costs, draw, predictor = (1e-3, 5e-6, 8e-9, 4e-10), random.Random(0), TimePredictor(guess)
    for _ in range(3000):
        work = draw_work(draw)
        predictor.learn(work, take(costs, work))
    for _ in range(100):
        work = draw_work(draw)
        assert predictor.predict(work) == pytest.approx(take(costs, work), rel=0.05)
    assert predictor.costs == pytest.approx(costs, rel=0.2)


def test_decoding_alone_teaches_nothing_of_prompts() -> None:
    predictor = TimePredictor(5e-6)
    for _ in range(1000):
        predictor.learn(StepWork(4, 4000), 0.003)
    assert predictor.predict(StepWork(4, 4000)) == pytest.approx(0.003, rel=1e-3)
    assert predictor.pair == TimePredictor(5e-6).pair
    assert predictor.token == pytest.approx(5e-6, rel=0.05)


def test_one_slow_step_changes_little() -> None:
    predictor, work = TimePredictor(5e-6), StepWork(8000, 100_000, 1e6)
    before = predictor.predict(work)
    predictor.learn(work, 1000 * before)
    assert before < predictor.predict(work) < before * LARGEST_ERROR ** (1.5 * GAIN)


def test_steps_that_were_not_timed_teach_nothing() -> None:
    predictor = TimePredictor(5e-6)
    predictor.learn(StepWork(8000, 0, 1e6), 0.0)
    assert predictor.costs == TimePredictor(5e-6).costs


def test_small_steps_of_one_time_do_not_make_large_ones_free_or_dear() -> None:
    """As where the host takes 20 ms to launch any of them."""
    predictor = TimePredictor(5e-6)
    for i in range(5000):
        chunk = 100 + 700 * (i % 6)
        predictor.learn(StepWork(chunk, 0, count_pairs(0, chunk)), 0.020)
    assert 0.5 < predictor.count_tokens(0.040) / 8000 < 1.5


@given(
    guess=st.floats(1e-7, 1e-2),
    seconds=st.floats(1e-4, 10.0),
    start=st.integers(0, 200_000),
)
def test_as_many_tokens_as_take_the_time(guess: float, seconds: float, start: int) -> None:
    predictor = TimePredictor(guess)
    count = predictor.count_tokens(seconds, start)

    def cost(num: int) -> float:
        return predictor.token * num + predictor.pair * count_pairs(start, num)

    assert cost(count) <= seconds * (1 + 1e-9)
    assert cost(count + 1) >= seconds * (1 - 1e-9)


class PredictorMachine(RuleBasedStateMachine):
    """Any steps, of any times."""

    @initialize(guess=st.sampled_from([0.0, 2e-6, 1e-4]))
    def start(self, guess: float) -> None:
        self.guess = guess
        self.predictor = TimePredictor(guess)

    @rule(
        rows=st.integers(0, 8192),
        context=st.integers(1, 100_000),
        chunk=st.integers(0, 32_768),
        start=st.integers(0, 100_000),
        seconds=st.floats(0.0, 100.0),
    )
    def learn(self, rows: int, context: int, chunk: int, start: int, seconds: float) -> None:
        work = StepWork(rows + chunk, rows * context, count_pairs(start, chunk))
        before = self.predictor.predict(work)
        self.predictor.learn(work, seconds)
        after = self.predictor.predict(work)
        if seconds > 0 and self.guess == 0:  # within bounds, a step is then predicted no worse
            low, high = sorted((before, seconds))
            assert low * 0.99 <= after <= high * 1.01 or abs(after - seconds) <= abs(before - seconds)

    @invariant()
    def costs_are_times(self) -> None:
        if not hasattr(self, "predictor"):
            return
        assert all(isfinite(cost) and cost > 0 for cost in self.predictor.costs)
        if self.guess:
            assert 0.999 * CHEAPEST <= self.predictor.token / self.guess <= 1.001 * DEAREST
        assert self.predictor.count_tokens(0.04) >= 0
        assert self.predictor.count_tokens(0.04, 1000) <= self.predictor.count_tokens(0.04)


TestPredictorMachine = PredictorMachine.TestCase
TestPredictorMachine.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)

LARGE = {
    "1B": (1.2e-3, 4.6e-6, 7.6e-9, 4.8e-10),
    "8B": (4.7e-3, 22e-6, 30e-9, 1.1e-9),
    "70B": (12e-3, 5e-5, 2e-8, 1e-9),
}


@pytest.mark.parametrize("model", LARGE)
@pytest.mark.parametrize(
    ("num_users", "num_prompt", "limit"), [(256, 1024, 0.04), (1000, 1200, 0.125), (8, 40_000, 0.04)]
)
@pytest.mark.parametrize("launch", [0.0, 0.02])
def test_a_limit_holds_within_a_fifth(model: str, num_users: int, num_prompt: int, limit: float, launch: float) -> None:
    """Users who ask again, 200 tokens each. Steps vary by 5 %, and take what the weights take to read, or to launch.

    Results come two steps late. Now and then a step takes five times as long.
    """
    costs, draw = LARGE[model], random.Random(num_prompt)
    predictor, limits = TimePredictor(1.1 * costs[1]), StepLimits(limit, limit)
    waiting, rows = deque([0] * num_users), list[list[int]]()  # tokens computed; context and tokens left
    late, full = deque[tuple[StepWork, float]](), list[float]()
    for _ in range(500):
        decoding = StepWork(len(rows), sum(context for context, _ in rows))
        budget = StepBudget(predictor, limits, 32_768)
        budget.allow_prompts(decoding, is_streaming=True)
        chunk, pairs, ready = 0, 0.0, list[list[int]]()
        while waiting and (count := budget.take_chunk(waiting[0], num_prompt - waiting[0])):
            chunk, pairs = chunk + count, pairs + count_pairs(waiting[0], count)
            waiting[0] += count
            if waiting[0] == num_prompt:
                waiting.popleft()
                ready.append([num_prompt, draw.randint(100, 300)])
        work = StepWork(len(rows) + chunk, decoding.keys, pairs)
        seconds = max(take(costs, work), launch if chunk else 0.0) * draw.uniform(0.95, 1.05)
        if chunk and waiting and take(costs, decoding) < 0.75 * limit:
            full.append(seconds)
        late.append((work, seconds * (5 if draw.random() < 0.002 else 1)))
        if len(late) > 2:
            predictor.learn(*late.popleft())
        for row in rows:
            row[0] += 1
            row[1] -= 1
        waiting.extend(0 for _, left in rows if not left)
        rows = [row for row in rows if row[1]] + ready
    full.sort()
    assert len(full) > 30
    assert full[len(full) * 98 // 100] < 1.2 * limit
    assert full[len(full) // 2] > 0.7 * limit


def test_without_a_measurement_the_first_guess_is_dear() -> None:
    """So that the first steps are small."""
    assert TimePredictor().token == UNMEASURED > LARGE["70B"][1]
