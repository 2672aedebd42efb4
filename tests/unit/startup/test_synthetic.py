from __future__ import annotations

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.drivers.step_checker import StepChecker
from toka_async.arrays import as_i32
from toka_async.messages import Ready, TokenSampling
from toka_async.startup.synthetic import GREEDY, SyntheticRows

READY = Ready(num_pages=20, page_size=4, max_seqs=6, max_context=30, vocab_size=50, max_tokens=64)


@settings(max_examples=60, deadline=None)
@given(
    page_size=st.sampled_from([1, 3, 16]),
    num_shared=st.integers(0, 3),
    events=st.lists(st.one_of(st.just(0), st.integers(1, 20)), max_size=12),
)
def test_steps_can_be_computed(page_size: int, num_shared: int, events: list[int]) -> None:
    """0 is a step of tokens alone; other numbers are the length of a new prompt after the shared pages."""
    ready = Ready(num_pages=30, page_size=page_size, max_seqs=4, max_context=70, vocab_size=9, max_tokens=64)
    rows, checker = SyntheticRows(ready, num_shared), StepChecker(ready)
    lengths: list[int] = []
    for event in events:
        length = num_shared * page_size + event
        if not rows.has_room(length if event else 0):
            break
        num_grouped = len(lengths) if num_shared else 0
        if event and (len(lengths) == ready.max_seqs or length > ready.max_context):
            continue
        checker.check(rows.make_step([length] if event else [], num_grouped=num_grouped))
        assert checker.rows[-1] == (len(lengths), event > 0)
        assert checker.tokens[-1] == len(lengths) + event
        assert len(checker.groups) == 0 or checker.groups[-1] == (0, num_grouped, num_shared)
        lengths = [length + 1 for length in lengths] + [length] * (event > 0)
    checker.check(rows.end())
    assert checker.is_empty


@given(lengths=st.lists(st.integers(1, 25), min_size=1, max_size=5), length=st.integers(0, 25))
def test_has_room_is_true_just_when_the_step_fits(lengths: list[int], length: int) -> None:
    rows = SyntheticRows(READY)
    assume(sum(-(-n // 4) for n in lengths) <= READY.num_pages)
    rows.make_step(lengths)
    needed = sum(-(-(n + 1) // 4) for n in lengths) + -(-length // 4)
    assert rows.has_room(length) == (needed <= READY.num_pages)


def test_has_room_minds_the_context() -> None:
    rows = SyntheticRows(READY)
    rows.make_step([29])
    assert rows.has_room(1)
    rows.make_step()
    assert not rows.has_room(1)


def test_room_is_of_the_context_and_of_the_cache() -> None:
    assert SyntheticRows(READY).count_room(4) == 26
    few = Ready(num_pages=2, page_size=4, max_seqs=6, max_context=30, vocab_size=50, max_tokens=64)
    assert SyntheticRows(few).count_room(4) == 4
    assert SyntheticRows(few).count_room(10) == -2


def test_rows_of_one_length_and_sampling_share_a_prompt() -> None:
    samplings = (GREEDY, TokenSampling(top_k=3))
    step = SyntheticRows(READY).make_step([5, 5, 5, 5, 9, 9], samplings)
    assert as_i32(step.admit_keys).tolist() == [0, 1, 0, 1, 2, 3]
    assert [as_i32(prompt.token_ids).size for prompt in step.prompts] == [5, 5, 9, 9]
    assert [prompt.sampling for prompt in step.prompts] == [*samplings, *samplings]


def test_shared_pages_are_not_computed() -> None:
    step = SyntheticRows(READY, num_shared=3).make_step([14, 13])
    assert as_i32(step.admit_starts).tolist() == [12, 12]
    assert as_i32(step.chunk_lengths).tolist() == [2, 1]
    assert [as_i32(prompt.pages).tolist() for prompt in step.prompts] == [[0, 1, 2]] * 2
    assert sorted(as_i32(step.page_ids).tolist()) == [3, 4]
    assert np.all(np.frombuffer(step.chunk_samples, np.bool_))
