"""Aborted requests: every sample ends once, with the tokens that it has."""

from __future__ import annotations

import pytest

from tests.drivers.page_rank import submit
from tests.drivers.small_core import SmallCore, got, wanted
from toka_async.arrays import i32_column
from toka_async.control import Abort, Pause, Resume
from toka_async.messages import Reason, TokenSampling

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
SCORED = TokenSampling(num_logprobs=1)


@pytest.mark.parametrize("stream", [False, True])
def test_running_samples_end_with_their_tokens_and_queued_ones_without(stream: bool) -> None:
    core = SmallCore(max_seqs=3)
    running = core.submit(submit(0, PROMPT, n=2, max_tokens=12, stream=stream, sampling=SCORED))
    waiting = core.submit(submit(1, PROMPT, n=3, max_tokens=12, sampling=SCORED, priority=1))
    other = core.submit(submit(2, PROMPT, max_tokens=12))
    for _ in range(6):
        core.turn()
    number = core.control(Abort(request_ids=i32_column([0, 1, 0, 77])))
    assert core.done[number].count == 2
    for sample, tokens in zip(running.samples, wanted(running), strict=True):
        assert sample.reason == Reason.ABORT
        assert 0 < len(sample.token_ids) < 12
        assert sample.token_ids == tokens[: len(sample.token_ids)]
        assert len(sample.logprobs) == len(sample.top_ids) == len(sample.token_ids)
    assert [sample.reason for sample in waiting.samples] == [Reason.ABORT] * 3
    assert got(waiting) == [[], [], []]
    core.drain()
    assert got(other) == wanted(other)


def test_preempted_samples_end_with_the_tokens_that_they_had() -> None:
    core = SmallCore(num_pages=8)
    received = [core.submit(submit(i, [*PROMPT, i], max_tokens=16, sampling=SCORED)) for i in range(2)]
    core.turn_until(lambda: core.core.take_messages() is None or core.stats.num_preemptions)
    while core.control(Pause(mode="keep")) not in core.done:
        core.complete()
    core.control(Abort(everything=True))
    for each in received:
        (tokens,), (whole,) = got(each), wanted(each)
        assert tokens
        assert tokens == whole[: len(tokens)]
        assert len(each.samples[0].logprobs) == len(each.samples[0].top_ids) == len(tokens)
    core.core.check()
    assert core.core.num_requests == 0


def test_an_aborted_prompt_continues_where_it_stopped() -> None:
    core = SmallCore()
    first = core.submit(submit(0, PROMPT, max_tokens=12, seed=5))
    for _ in range(5):
        core.turn()
    core.control(Pause(mode="abort"))
    (part,) = got(first)
    assert first.samples[0].reason == Reason.ABORT
    core.control(Resume())
    rest = core.submit(submit(1, [*PROMPT, *part], max_tokens=12 - len(part), seed=5))
    core.drain()
    assert [*part, *got(rest)[0]] == wanted(first)[0]


def test_a_prompt_whose_scores_are_wanted_fails_until_they_are_computed() -> None:
    core = SmallCore(max_tokens=8)
    scored = TokenSampling(num_prompt_logprobs=0)
    early = core.submit(submit(0, PROMPT, n=2, max_tokens=0, sampling=scored))
    core.turn()
    core.control(Abort(everything=True))
    assert early.failed == "it was aborted before its prompt's log-probs were computed"
    late = core.submit(submit(1, PROMPT, max_tokens=9, sampling=scored))
    core.turn_until(lambda: late.prefilled is not None)
    core.control(Abort(everything=True))
    assert late.samples[0].reason == Reason.ABORT
    core.drain()
