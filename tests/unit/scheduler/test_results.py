from __future__ import annotations

import pytest

from tests.drivers.page_rank import submit
from tests.drivers.small_core import VOCAB, SmallCore, got, wanted
from toka_async.arrays import EMPTY, as_f32, i32_column
from toka_async.messages import Reason, StepDone, TokenSampling
from toka_async.scheduler.sequences.sequence_table import NUM_ENDS

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def test_a_request_is_sent_whole_when_it_ends() -> None:
    core = SmallCore()
    received = core.submit(submit(0, PROMPT, max_tokens=5))
    core.drain()
    (sample,) = received.samples
    assert got(received) == wanted(received)
    assert (sample.reason, sample.num_rows) == (Reason.LENGTH, 1)
    assert sample.logprobs == []


def test_a_streamed_request_is_sent_token_by_token() -> None:
    core = SmallCore()
    received = core.submit(submit(0, PROMPT, n=2, max_tokens=5, stream=True, sampling=TokenSampling(num_logprobs=0)))
    core.drain()
    assert got(received) == wanted(received)
    for sample in received.samples:
        assert (sample.reason, sample.num_rows) == (Reason.LENGTH, 5)
        assert sample.logprobs == pytest.approx([-token / 7 for token in sample.token_ids])


@pytest.mark.parametrize("num_ends", [1, NUM_ENDS, NUM_ENDS + 5])
def test_an_end_token_is_the_last_one(num_ends: int) -> None:
    core = SmallCore()
    sampling = TokenSampling(end_ids=i32_column(range(VOCAB - num_ends, VOCAB)))
    received = core.submit(submit(0, PROMPT, n=8, max_tokens=60, sampling=sampling))
    core.drain()
    assert got(received) == wanted(received)
    stopped = [sample for sample in received.samples if sample.reason == Reason.STOP]
    assert stopped
    assert all(sample.token_ids[-1] >= VOCAB - num_ends for sample in stopped)


@pytest.mark.parametrize("steps_ahead", [1, 2, 5])
def test_an_end_found_late_wastes_a_token_a_queued_step(steps_ahead: int) -> None:
    core = SmallCore(steps_ahead=steps_ahead)
    sampling = TokenSampling(end_ids=i32_column(range(VOCAB)))  # the first token ends every sample
    received = core.submit(submit(0, PROMPT, n=8, max_tokens=50, sampling=sampling))
    core.drain()
    assert [sample.reason for sample in received.samples] == [Reason.STOP] * 8
    assert core.stats.generated_tokens == 8
    assert core.stats.wasted_tokens == 8 * (steps_ahead - 1)


def test_an_end_by_length_wastes_nothing() -> None:
    core = SmallCore(steps_ahead=5)
    core.submit(submit(0, PROMPT, n=8, max_tokens=7))
    core.drain()
    assert (core.stats.generated_tokens, core.stats.wasted_tokens) == (56, 0)


@pytest.mark.parametrize("n", [1, 3])
def test_no_tokens_wanted_computes_the_prompt_only(n: int) -> None:
    core = SmallCore()
    scored = TokenSampling(num_prompt_logprobs=0)
    received = core.submit(submit(0, PROMPT, n=n, max_tokens=0, sampling=scored))
    core.drain()
    assert [(sample.token_ids, sample.reason) for sample in received.samples] == [([], Reason.LENGTH)] * n
    assert received.prefilled is not None
    assert len(as_f32(received.prefilled.logprobs)) == len(PROMPT) - 1
    assert core.pages.num_computed == len(PROMPT) - 1


def test_results_out_of_order_are_a_defect() -> None:
    core = SmallCore()
    core.submit(submit(0, PROMPT))
    core.build()
    with pytest.raises(AssertionError, match="in order"):
        core.core.complete(StepDone(step_id=1, token_ids=EMPTY), 0.0)


def test_the_prompt_is_announced_once_and_before_the_tokens() -> None:
    core = SmallCore()
    received = core.submit(submit(0, PROMPT, n=3, max_tokens=5, stream=True))
    core.turn_until(lambda: received.prefilled or any(sample.token_ids for sample in received.samples))
    assert received.prefilled is not None
    core.drain()  # the driver refuses a second one
