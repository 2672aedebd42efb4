"""Steps of random events against sequences that are lists of tokens: sampled by torch, by kernels, in graphs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.drivers.rows import VOCAB, Driver, Request
from toka_async.arrays import f32_column, i32_column
from toka_async.messages import TokenSampling

SAMPLINGS = (
    TokenSampling(temperature=0),
    TokenSampling(temperature=0.8),
    TokenSampling(temperature=1.3, top_p=0.8, top_k=7, min_p=0.05),
    TokenSampling(temperature=0, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.7),
    TokenSampling(temperature=0.9, repetition_penalty=0.8),
    TokenSampling(temperature=0.9, frequency_penalty=1.5),
    TokenSampling(
        temperature=0.7,
        bias_ids=i32_column([3, 5, VOCAB + 9]),
        bias_values=f32_column([2.0, -100.0, 1.0]),
        min_tokens=3,
        end_ids=i32_column([1, 2, 4, VOCAB + 1]),
    ),
    TokenSampling(temperature=1.5, allowed_ids=i32_column([3, 11, 12, VOCAB + 2]), repetition_penalty=1.2),
)

PROMPTS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40)
SEEDS = st.integers(-(2**63), 2**63 - 1)
EVENTS = st.one_of(
    st.tuples(st.just("start"), PROMPTS, st.integers(0, len(SAMPLINGS) - 1), SEEDS, st.booleans()),
    st.tuples(st.just("fork"), st.integers(0, 7), SEEDS),
    st.tuples(st.just("free"), st.integers(0, 7)),
    st.tuples(st.just("preempt"), st.integers(0, 7)),
    st.tuples(st.just("step"), st.lists(st.integers(1, 30), min_size=1, max_size=6), st.booleans()),
)


NewDriver = Callable[[int, int], Driver]


KINDS = ["torch", "kernels", "graphs", "2 stages torch", "3 stages graphs"]


@pytest.fixture(params=KINDS)
def new_driver(request: pytest.FixtureRequest) -> NewDriver:
    """Of a page size and a number of pages.

    Graphs are of up to 4 rows that decode, or 24 tokens of any: larger steps go without.
    """
    *stages, kind = request.param.split()
    num_stages = int(stages[0]) if stages else 1
    if kind == "torch":
        return lambda page_size, num_pages: Driver(
            page_size, num_pages=num_pages, num_stages=num_stages, num_parts=num_stages + 1
        )
    request.getfixturevalue("fake_graphs" if kind == "graphs" else "plain_kernels")

    def new(page_size: int, num_pages: int) -> Driver:
        driver = Driver(
            page_size, num_pages=num_pages, use_kernels=True, num_stages=num_stages, num_parts=num_stages + 1
        )
        for stage in driver.stages:
            assert stage.decode is not None
            assert stage.mixed is not None
            if kind == "graphs":
                list(stage.decode.capture([1, 2, 4], 0))
                list(stage.mixed.capture([2, 8, 24], grouped=False))
        return driver

    return new


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(page_size=st.sampled_from([1, 3, 5, 16]), events=st.lists(EVENTS, max_size=40))
def test_random_events(new_driver: NewDriver, page_size: int, events: list[tuple]) -> None:  # type: ignore[type-arg]
    driver = new_driver(page_size, 1500)
    for event in events:
        match event:
            case ("start", prompt, sampling, seed, own_pages):
                driver.start(Request(prompt, SAMPLINGS[sampling]), seed, own_pages=own_pages)
            case ("fork", index, seed) if driver.rows:
                driver.fork(driver.rows[index % len(driver.rows)], seed)
            case ("free", index) if driver.rows:
                driver.free(driver.rows[index % len(driver.rows)])
            case ("preempt", index) if driver.rows:
                row = driver.rows[index % len(driver.rows)]
                if tokens := driver.free(row):
                    driver.start(row.request, row.seed, tokens)
            case ("step", lengths, reverse):
                driver.step(lengths, reverse)
    for _ in range(3):
        driver.step([100] * 8)


# Whole pages, a page and a token more, all but one token of a page, a single token.
@pytest.mark.parametrize(("page_size", "prompt_length"), [(1, 16), (3, 15), (5, 16), (16, 15), (16, 1)])
def test_forks_and_resumed_rows(new_driver: NewDriver, page_size: int, prompt_length: int) -> None:
    """Two requests at once: chunks beside decoding rows, forks with a copied tail, a preemption, slots used again."""
    driver = new_driver(page_size, 200)
    prompt = np.arange(prompt_length) % VOCAB
    first = driver.start(Request(prompt.tolist(), SAMPLINGS[1]), seed=11)
    assert first is not None
    while not first.decoding:
        driver.step([6])
    second = driver.start(Request([2] * 20, SAMPLINGS[3]), seed=5, own_pages=True)
    assert second is not None
    forks = [driver.fork(first, seed) for seed in (12, 13)]
    for index in range(8):
        driver.step([7], reverse=index % 3 == 0)
    rows = [first, second, *(fork for fork in forks if fork is not None)]
    assert len(rows) == 4
    lengths = [len(driver.free(row)) for row in rows]
    assert lengths[0] > prompt_length + 8
    resumed = [driver.start(row.request, row.seed, row.tokens) for row in rows]
    for _ in range(4):
        driver.step([8] * 4)
    continued = new_driver(page_size, 200)
    whole = continued.start(rows[0].request, rows[0].seed)
    assert whole is not None
    assert resumed[0] is not None
    while len(whole.tokens) < len(resumed[0].tokens):
        continued.step([100])
    assert whole.tokens == resumed[0].tokens


def test_penalties_of_forks_and_resumed_rows(new_driver: NewDriver) -> None:
    """Each row's counts are of its own tokens: forks copy the ids of a half-filled page, and nothing after it."""
    for sampling in (SAMPLINGS[3], SAMPLINGS[5], SAMPLINGS[6]):
        driver = new_driver(5, 200)
        leader = driver.start(Request([1, 2, 3, 4, 5, 6, 7], sampling), seed=1)
        assert leader is not None
        for _ in range(9):
            driver.step([100])
        forks = [driver.fork(leader, seed) for seed in (2, 3, 4)]
        for _ in range(9):
            driver.step()
        for row in [leader, *forks]:
            assert row is not None
            driver.free(row)
            driver.start(row.request, row.seed, row.tokens)
        for _ in range(5):
            driver.step([7] * 4)
