from __future__ import annotations

import pytest

from tests.drivers.page_rank import submit
from tests.drivers.small_core import SmallCore, built, got, wanted
from toka_async.arrays import as_bool, as_i32
from toka_async.messages import Step, TokenSampling

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def num_tokens(step: Step, core: SmallCore) -> int:
    """Tokens of a step that has just run."""
    return len(core.pages.order) + int(as_i32(step.chunk_lengths).sum())


def test_a_steady_decode_step_is_small() -> None:
    core = SmallCore(num_pages=4096, page_size=64, max_seqs=512, max_tokens=2048)
    core.submit(submit(0, PROMPT, n=512, max_tokens=30))
    core.drain()
    steady = core.step_sizes[3:-1]
    assert len(steady) > 20
    assert max(steady) < 1024
    assert min(steady) < 80


def test_page_boundaries_cost_two_numbers_a_row() -> None:
    core = SmallCore(num_pages=1024, max_seqs=100, max_tokens=128)
    core.submit(submit(0, PROMPT, n=100, max_tokens=20))
    core.drain()
    assert 100 * 8 < max(core.step_sizes[3:-1]) < 100 * 8 + 100


def test_samples_of_a_prompt_compute_it_once() -> None:
    core = SmallCore()
    received = core.submit(submit(0, PROMPT, n=5, max_tokens=7))
    core.drain()
    assert got(received) == wanted(received)
    assert core.pages.num_computed == (len(PROMPT) - 1) + 5 * 7
    assert core.stats.prompt_tokens == len(PROMPT) - 1


@pytest.mark.parametrize("max_tokens", [8, 11, 16])
def test_no_step_computes_more_than_max_tokens(max_tokens: int) -> None:
    core = SmallCore(max_tokens=max_tokens, num_pages=200)
    received = [core.submit(submit(i, [i % 7] * 30 + PROMPT, n=1 + i % 3, max_tokens=9)) for i in range(12)]
    sizes = []
    for _ in range(1000):
        core.build()
        if not core.queued:
            break
        step = core.queued[0]
        core.complete()
        sizes.append(num_tokens(step, core))
    assert max(sizes) == max_tokens
    for entry in received:
        assert got(entry) == wanted(entry)


def test_a_long_prompt_is_computed_in_chunks_beside_decoding_rows() -> None:
    core = SmallCore(max_tokens=10, max_seqs=2, steps_ahead=1)
    core.submit(submit(0, PROMPT[:3], max_tokens=30))
    core.turn()
    core.submit(submit(1, PROMPT * 3, max_tokens=1))
    lengths, samples = [], []
    for _ in range(4):
        step = built(core)
        lengths += as_i32(step.chunk_lengths).tolist()
        samples += as_bool(step.chunk_samples).tolist()
        core.complete()
        assert core.pages.order.size == 1
    assert lengths == [9, 9, 9, 3]
    assert samples == [False, False, False, True]


def test_found_prefixes_are_not_computed_and_are_counted() -> None:
    core = SmallCore()
    first = core.submit(submit(0, PROMPT, max_tokens=2))
    core.drain()
    before = core.pages.num_computed
    second = core.submit(submit(1, [*PROMPT, 3, 1], max_tokens=1))
    core.drain()
    assert core.pages.num_computed - before == 12 - 8
    assert first.prefilled is not None
    assert second.prefilled is not None
    assert (first.prefilled.cached_tokens, second.prefilled.cached_tokens) == (0, 8)
    assert (core.stats.prefix_queries, core.stats.prefix_hits) == (22, 8)
    assert core.stats.prompt_tokens == 10 + 4
    assert got(second) == wanted(second)


def test_a_prompt_finds_those_of_its_salt_only() -> None:
    """Neither prompts nor the outputs that follow them, which the next turn of a conversation would find."""
    core = SmallCore()
    salts = (0, 7, 8, 7, 0)
    asked = []
    for i, salt in enumerate(salts):
        asked.append(core.submit(submit(i, PROMPT, max_tokens=6, salt=salt)))
        core.drain()
    found = [each.prefilled.cached_tokens for each in asked if each.prefilled]
    assert found == [0, 0, 0, 8, 8]
    turn = [*PROMPT, *got(asked[1])[0]]
    for i, (salt, wanted_hits) in enumerate([(9, 0), (7, 12)]):
        later = core.submit(submit(10 + i, turn, max_tokens=1, salt=salt))
        core.drain()
        assert later.prefilled is not None
        assert later.prefilled.cached_tokens == wanted_hits
        assert got(later) == wanted(later)


def test_a_prompt_finds_what_the_step_before_it_computes() -> None:
    """Neither step has run when the second prompt is opened."""
    core = SmallCore(steps_ahead=4)
    core.submit(submit(0, PROMPT, max_tokens=2))
    second = core.submit(submit(1, PROMPT, max_tokens=2))
    core.drain()
    assert second.prefilled is not None
    assert second.prefilled.cached_tokens == 8
    assert got(second) == wanted(second)


def test_without_the_prefix_cache_nothing_is_found() -> None:
    core = SmallCore(prefix=False)
    for i in range(2):
        core.submit(submit(i, PROMPT, max_tokens=1))
        core.drain()
    assert core.stats.prefix_hits == 0
    assert core.stats.prompt_tokens == 20
    assert core.stats.pages_cached == 0


def test_prompt_logprobs_are_computed_not_looked_up() -> None:
    core = SmallCore()
    core.submit(submit(0, PROMPT, max_tokens=1))
    core.drain()
    scored = core.submit(submit(1, PROMPT, max_tokens=1, sampling=TokenSampling(num_prompt_logprobs=0)))
    core.drain()
    assert scored.prefilled is not None
    assert scored.prefilled.cached_tokens == 0
    assert len(scored.prefilled.logprobs) == 4 * (len(PROMPT) - 1)
    assert core.stats.prompt_tokens == 20


def test_requests_start_in_order_of_arrival_though_a_later_one_would_fit() -> None:
    core = SmallCore(num_pages=8, max_seqs=4, steps_ahead=1)
    core.submit(submit(0, PROMPT, max_tokens=6))
    core.turn()
    large = core.submit(submit(1, list(range(22)), max_tokens=1))
    small = core.submit(submit(2, [5], max_tokens=1))
    core.turn()
    assert len(core.pages.rows) == 1  # a page would do for the second of them
    core.turn_until(lambda: small.ended)
    assert large.ended
    core.drain()
    assert got(small) == wanted(small)


def test_lower_priority_numbers_start_first() -> None:
    core = SmallCore(max_seqs=1, max_tokens=16, steps_ahead=1)
    received = {p: core.submit(submit(i, PROMPT, max_tokens=1, priority=p)) for i, p in enumerate([3, 0, -1, 2])}
    ended: list[int] = []
    while core.turn():
        ended += [p for p, entry in received.items() if entry.ended and p not in ended]
    assert ended == [-1, 0, 2, 3]


def test_an_urgent_request_starts_though_samples_of_another_wait_for_slots() -> None:
    """Samples that wait keep slots from prompts that come after them, not from those that come before."""
    core = SmallCore(max_seqs=4, steps_ahead=1, num_pages=200)
    bulk = core.submit(submit(0, PROMPT, n=50, max_tokens=30, priority=5))
    long = core.submit(submit(1, PROMPT[1:], max_tokens=300))
    core.turn()
    core.turn()
    urgent = core.submit(submit(2, PROMPT[2:], max_tokens=3, priority=-1))
    for _ in range(40):
        core.turn()
    assert urgent.ended
    assert not bulk.ended
    assert not long.ended


def test_prompts_do_not_take_slots_that_samples_before_them_wait_for() -> None:
    core = SmallCore(max_seqs=4, steps_ahead=1)
    core.submit(submit(0, PROMPT, n=8, max_tokens=2))
    core.submit(submit(1, PROMPT[::-1], max_tokens=2))
    assert len(built(core).prompts) == 1
    core.complete()
    core.build()
    core.complete()
    assert len(core.pages.order) == 4


def test_samples_do_not_start_in_the_step_that_computes_their_prompt() -> None:
    """Stages of a pipeline compute a step in parts: a row would read what a later part writes."""
    core = SmallCore(num_pages=64, page_size=4, steps_ahead=1)
    prompt = PROMPT[:9]  # two pages, and the token that samples begin with
    received = [core.submit(submit(i, prompt, n=2, max_tokens=3)) for i in range(2)]
    first = built(core)
    assert as_i32(first.chunk_lengths).tolist() == [8]
    assert not first.joined
    core.complete()
    core.build()
    assert len(as_i32(core.queued[0].joined)) == 4
    core.drain()
    for one in received:
        assert got(one) == wanted(one)
    assert core.stats.prompt_tokens == 8
