from __future__ import annotations

from typing import cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.drivers.step_checker import StepChecker
from toka_async.arrays import EMPTY, as_i32
from toka_async.messages import Ready, Step, StepDone
from toka_async.runner.runner import Runner
from toka_async.startup.token_time import RUNS, measure_token_seconds


class TimedRunner:
    """Checks steps and computes nothing. The first step of prompts takes longer, as if it compiled."""

    def __init__(self, ready: Ready) -> None:
        self.ready = ready
        self.checker = StepChecker(ready)
        self.sizes: list[int] = []

    def run(self, step: Step) -> StepDone:
        self.checker.check(step)
        size = int(as_i32(step.chunk_lengths).sum())
        if size:
            self.sizes.append(size)
        return StepDone(step_id=step.step_id, token_ids=EMPTY, seconds=1e-5 * size * (1 + 9 * (len(self.sizes) == 1)))


@given(
    max_seqs=st.integers(1, 20),
    more=st.integers(0, 20_000),
    max_context=st.integers(1, 2000),
)
def test_a_large_step_is_timed_once_it_is_compiled(max_seqs: int, more: int, max_context: int) -> None:
    ready = Ready(
        num_pages=1000,
        page_size=16,
        max_seqs=max_seqs,
        max_context=max_context,
        vocab_size=10,
        max_tokens=max_seqs + more,
    )
    runner = TimedRunner(ready)
    assert measure_token_seconds(cast(Runner, runner)) == pytest.approx(1e-5)
    assert len(runner.sizes) == RUNS
    assert runner.checker.is_empty


def test_it_has_thousands_of_tokens_where_they_fit() -> None:
    ready = Ready(num_pages=1000, page_size=16, max_seqs=64, max_context=4096, vocab_size=10, max_tokens=32_768)
    runner = TimedRunner(ready)
    measure_token_seconds(cast(Runner, runner))
    assert set(runner.sizes) == {8192}
    small = TimedRunner(msgspec.structs.replace(ready, max_tokens=1200))
    measure_token_seconds(cast(Runner, small))
    assert set(small.sizes) == {1024}
