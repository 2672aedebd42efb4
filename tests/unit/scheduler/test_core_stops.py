from __future__ import annotations

import numpy as np
import pytest

from tests.drivers.page_rank import submit
from tests.drivers.small_core import VOCAB, SmallCore, got, wanted
from toka_async.arrays import column
from toka_async.messages import DropStop, Reason, StopMask, TokenSampling

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def stop_mask(tokens: list[int], window: int) -> StopMask:
    mask = np.zeros(VOCAB, np.bool_)
    mask[tokens] = True
    return StopMask(stop_id=1, mask=column(mask), window=window)


def test_stop_checks_show_the_last_tokens_of_rows_that_may_have_stopped() -> None:
    core = SmallCore()
    core.core.receive(stop_mask([3, 4], window=5), 0.0)
    received = core.submit(submit(0, PROMPT, n=3, max_tokens=40, stop_id=1))
    other = core.submit(submit(1, PROMPT, max_tokens=40))
    core.drain()
    expected = set()
    for index, tokens in enumerate(wanted(received)):
        for end, token in enumerate(tokens[:-1], start=1):  # the last one ends it anyway
            if token in (3, 4):
                expected.add((0, index, end, tuple(tokens[max(0, end - 5) : end])))
    assert expected
    assert {(*check[:3], tuple(check[3])) for check in core.stop_checks} == expected
    assert got(received) == wanted(received)
    assert got(other) == wanted(other)


def test_stop_checks_begin_with_min_tokens() -> None:
    core = SmallCore()
    core.core.receive(stop_mask(list(range(VOCAB)), window=2), 0.0)
    core.submit(submit(0, PROMPT, max_tokens=9, stop_id=1, sampling=TokenSampling(min_tokens=5)))
    core.drain()
    assert [check[2] for check in core.stop_checks] == [5, 6, 7, 8]


def test_streamed_rows_are_not_asked_about() -> None:
    core = SmallCore()
    core.core.receive(stop_mask(list(range(VOCAB)), window=2), 0.0)
    core.submit(submit(0, PROMPT, max_tokens=9, stop_id=1, stream=True))
    core.drain()
    assert core.stop_checks == []


def test_a_dropped_set_can_be_registered_anew() -> None:
    core = SmallCore()
    core.core.receive(stop_mask([3], window=2), 0.0)
    core.core.receive(DropStop(stop_id=1), 0.0)
    core.core.receive(stop_mask([], window=2), 0.0)
    core.submit(submit(0, PROMPT, max_tokens=30, stop_id=1))
    core.drain()
    assert core.stop_checks == []


def test_a_stop_string_ends_a_running_sample() -> None:
    core = SmallCore(steps_ahead=3)
    core.core.receive(stop_mask(list(range(VOCAB)), window=2), 0.0)
    received = core.submit(submit(0, PROMPT, n=3, max_tokens=40, stop_id=1, sampling=TokenSampling(num_logprobs=1)))
    core.turn_until(lambda: any(check[1:3] == (1, 6) for check in core.stop_checks))
    core.end(0, 1, 4)
    sample = received.samples[1]
    assert sample.reason == Reason.STOP_STRING
    assert sample.token_ids == wanted(received)[1][:4]
    assert [top[0] for top in sample.top_ids] == sample.token_ids
    core.end(0, 1, 4)  # again: it has ended
    core.drain()
    assert [s.reason for s in received.samples] == [Reason.LENGTH, Reason.STOP_STRING, Reason.LENGTH]
    assert got(received)[0] == wanted(received)[0]
    assert core.stats.wasted_tokens > 0


def test_a_streamed_sample_ends_without_further_tokens() -> None:
    core = SmallCore()
    received = core.submit(submit(0, PROMPT, max_tokens=40, stream=True))
    core.turn_until(lambda: len(received.samples[0].token_ids) >= 5)
    seen = list(received.samples[0].token_ids)
    core.end(0, 0, 3)
    core.drain()
    assert received.samples[0].token_ids == seen
    assert received.samples[0].reason == Reason.STOP_STRING


@pytest.mark.parametrize("stream", [False, True])
def test_a_preempted_sample_that_waits_ends_from_the_queue(stream: bool) -> None:
    core = SmallCore(num_pages=8, steps_ahead=1)
    old = core.submit(submit(0, PROMPT[:5], max_tokens=20))
    young = core.submit(submit(1, PROMPT[1:5], max_tokens=20, stream=stream))
    core.turn_until(lambda: core.core._preemption.num_preemptions)
    assert core.core._requests[1].waiting
    core.end(1, 0, 2)
    (sample,) = young.samples
    assert sample.reason == Reason.STOP_STRING
    assert sample.token_ids[:2] == wanted(young)[0][:2]
    assert stream or len(sample.token_ids) == 2
    core.drain()
    assert got(old) == wanted(old)


def test_the_end_of_a_sample_that_never_started_or_is_unknown_is_nothing() -> None:
    core = SmallCore(max_seqs=1, max_tokens=5, steps_ahead=1)
    received = core.submit(submit(0, PROMPT, n=3, max_tokens=4))
    for request_id, sample in [(0, 0), (0, 2), (9, 0)]:  # the prompt is being computed, in a sequence that is no sample
        core.build()
        core.end(request_id, sample, 1)
    assert not any(sample.reason for sample in received.samples)
    core.drain()
    assert got(received) == wanted(received)


def test_the_end_of_a_sample_that_waits_for_its_first_slot_is_nothing() -> None:
    core = SmallCore(max_seqs=1, max_tokens=16)
    core.submit(submit(0, PROMPT, max_tokens=30))
    waiting = core.submit(submit(1, PROMPT, max_tokens=4))
    core.turn()
    core.end(1, 0, 1)
    assert not waiting.ended
    core.drain()
    assert got(waiting) == wanted(waiting)
