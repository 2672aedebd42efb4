from __future__ import annotations

import pytest

from tests.drivers.page_rank import submit
from tests.drivers.small_core import SmallCore, got, wanted
from toka_async.arrays import as_f32, i32_column
from toka_async.messages import Reason, TokenSampling

PROMPT = [1, 2, 3, 4, 5]


@pytest.mark.parametrize("steps_ahead", [1, 2, 4])
@pytest.mark.parametrize("prefix", [False, True])
def test_preempted_samples_keep_their_tokens_and_random_streams(steps_ahead: int, prefix: bool) -> None:
    core = SmallCore(num_pages=16, steps_ahead=steps_ahead, prefix=prefix)
    received = [core.submit(submit(i, [*PROMPT, i], max_tokens=20)) for i in range(6)]
    core.drain()
    assert core.stats.num_preemptions > 0
    assert core.stats.recomputed_tokens > 0
    assert core.stats.wasted_tokens == 0  # what was on its way belongs to them
    for entry in received:
        assert got(entry) == wanted(entry)
        assert entry.samples[0].num_rows == 1


def test_samples_of_one_prompt_are_preempted_one_by_one() -> None:
    core = SmallCore(num_pages=14)
    received = core.submit(submit(0, PROMPT, n=6, max_tokens=16, sampling=TokenSampling(num_logprobs=2)))
    core.drain()
    assert core.stats.num_preemptions > 0
    assert got(received) == wanted(received)
    for sample in received.samples:
        assert [top[0] for top in sample.top_ids] == sample.token_ids
        assert len(sample.logprobs) == 16


def test_the_youngest_yields() -> None:
    core = SmallCore(num_pages=8, steps_ahead=1)
    old = core.submit(submit(0, PROMPT, max_tokens=20))
    young = core.submit(submit(1, PROMPT[1:], max_tokens=20))
    core.turn_until(lambda: old.ended)
    assert not young.ended
    assert core.stats.num_preemptions >= 1
    core.drain()
    assert got(young) == wanted(young)


def test_lower_priority_yields_though_it_came_first() -> None:
    core = SmallCore(num_pages=8, steps_ahead=1)
    low = core.submit(submit(0, PROMPT, max_tokens=20, priority=1))
    high = core.submit(submit(1, PROMPT[1:], max_tokens=20))
    core.turn_until(lambda: high.ended)
    assert not low.ended
    core.drain()
    assert core.stats.num_preemptions >= 1
    assert got(low) == wanted(low)


def test_a_streamed_sample_goes_on_where_it_was() -> None:
    core = SmallCore(num_pages=8)
    received = [core.submit(submit(i, [*PROMPT, i], max_tokens=20, stream=True)) for i in range(3)]
    core.drain()
    assert core.stats.num_preemptions > 0
    for entry in received:
        assert got(entry) == wanted(entry)
        assert entry.samples[0].num_rows == 20


def test_prompt_logprobs_are_sent_once_when_a_prompt_is_computed_again() -> None:
    core = SmallCore(num_pages=12, page_size=2, max_seqs=6, max_tokens=6, steps_ahead=1, prefix=False)
    sampling = TokenSampling(num_prompt_logprobs=0)
    received = core.submit(submit(0, [0, 0], n=9, max_tokens=3, sampling=sampling))
    core.drain()
    assert core.stats.num_preemptions > 0
    assert received.prefilled is not None
    assert as_f32(received.prefilled.logprobs).tolist() == [-0.5]
    assert got(received) == wanted(received)


def test_prompt_logprobs_are_not_computed_again() -> None:
    """The ranks are told not to: once sent, nobody wants them."""
    core = SmallCore(num_pages=8, steps_ahead=1)
    sampling = TokenSampling(num_prompt_logprobs=0)
    core.submit(submit(0, PROMPT, max_tokens=20, sampling=sampling))
    core.submit(submit(1, PROMPT[1:], max_tokens=20, sampling=sampling))
    wants = []
    for _ in range(1000):
        core.build()
        if not core.queued:
            break
        wants += [prompt.sampling.num_prompt_logprobs for step in core.queued for prompt in step.prompts]
        core.complete()
    assert wants[:2] == [0, 0]
    assert len(wants) > 2
    assert set(wants[2:]) == {-1}


def test_a_prompt_preempted_while_it_is_computed_starts_anew() -> None:
    core = SmallCore(num_pages=12, max_tokens=8, steps_ahead=1)
    old = core.submit(submit(0, PROMPT, max_tokens=40))
    core.turn()
    long = core.submit(submit(1, list(range(20)) + PROMPT * 4, max_tokens=2))
    core.drain()
    assert core.stats.num_preemptions > 0
    assert got(old) == wanted(old)
    assert got(long) == wanted(long)


def test_cached_tokens_are_those_found_at_first() -> None:
    """A preempted request finds its own pages again: that is no hit."""
    core = SmallCore(num_pages=16)
    received = [core.submit(submit(i, [i] * 9, max_tokens=20)) for i in range(6)]
    core.drain()
    assert core.stats.num_preemptions > 0
    assert [entry.prefilled.cached_tokens for entry in received if entry.prefilled] == [0] * 6
    assert (core.stats.prefix_queries, core.stats.prefix_hits) == (54, 0)


def test_a_draining_sample_that_stops_is_not_queued_again() -> None:
    """Preempted with steps on their way, of which one brings an end token."""
    ends = TokenSampling(end_ids=i32_column(range(5)))
    core = SmallCore(num_pages=16, steps_ahead=4, max_seqs=16)
    received = [core.submit(submit(i, [*PROMPT, i], max_tokens=24, sampling=ends)) for i in range(40)]
    core.drain()
    assert core.stats.num_preemptions > 0
    assert any(entry.samples[0].reason == Reason.STOP for entry in received)
    for entry in received:
        assert got(entry) == wanted(entry)


def test_waiting_prompts_give_their_pages_to_an_earlier_one() -> None:
    """A computed prompt whose samples wait for pages yields to running work, and comes back."""
    core = SmallCore(num_pages=10, max_seqs=2, steps_ahead=1)
    first = core.submit(submit(0, PROMPT, max_tokens=30))
    many = core.submit(submit(1, PROMPT * 2, n=3, max_tokens=8))
    core.drain()
    assert got(first) == wanted(first)
    assert got(many) == wanted(many)
