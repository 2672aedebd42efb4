from __future__ import annotations

from tests.drivers.page_rank import submit
from tests.drivers.small_core import SmallCore, built, got, wanted
from toka_async.arrays import as_i32
from toka_async.messages import TokenSampling

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def test_prompt_pages_are_shared_and_the_tail_is_copied() -> None:
    core = SmallCore(steps_ahead=1)
    core.submit(submit(0, PROMPT, n=5, max_tokens=20))  # 9 tokens to share: two pages, and a third with one token
    core.turn()
    assert core.stats.pages_used == 3
    step = built(core)
    assert len(set(as_i32(step.copy_sources).tolist())) == 1
    assert len(set(as_i32(step.copy_targets).tolist())) == 5
    core.complete()
    rows = [row.pages for row in core.pages.rows.values()]
    assert len({tuple(row[:2]) for row in rows}) == 1
    assert len({row[2] for row in rows}) == 5
    core.turn()
    assert core.stats.pages_used in (2 + 5, 3 + 5)  # a message may be one step old
    assert core.core._running.cache.num_used == 2 + 5  # the prompt's own tail was given back


def test_a_prompt_of_whole_pages_and_one_token_has_no_tail() -> None:
    core = SmallCore(steps_ahead=1)
    received = core.submit(submit(0, PROMPT[:9], n=3, max_tokens=2))
    core.turn()
    step = built(core)
    assert len(as_i32(step.copy_sources)) == 0
    assert len(as_i32(step.page_ids)) == 3
    core.drain()
    assert got(received) == wanted(received)


def test_an_end_by_length_gives_slot_and_pages_to_the_very_next_step() -> None:
    core = SmallCore(max_seqs=1, max_tokens=16, num_pages=3, steps_ahead=8)
    core.submit(submit(0, PROMPT, max_tokens=2))
    core.submit(submit(1, PROMPT[::-1], max_tokens=2))
    core.build()
    steps = list(core.queued)
    assert len(steps) == 4  # nothing has come back yet
    assert len(as_i32(steps[2].freed)) == 1
    assert as_i32(steps[2].freed).tolist() == as_i32(steps[2].admit_slots).tolist()
    core.drain()
    for entry in core.received.values():
        assert got(entry) == wanted(entry)


def test_samples_wait_for_slots_and_all_are_computed() -> None:
    core = SmallCore(num_pages=128, max_seqs=8)
    received = core.submit(submit(0, PROMPT, n=1024, max_tokens=2))
    core.drain()
    assert got(received) == wanted(received)
    assert core.pages.num_computed == 9 + 1024 * 2


def test_a_prompt_whose_pages_are_all_cached_starts_its_samples_at_once() -> None:
    core = SmallCore(steps_ahead=1)
    core.submit(submit(0, PROMPT[:9], n=2, max_tokens=1))
    core.drain()
    again = core.submit(submit(1, PROMPT[:9], n=2, max_tokens=2))
    step = built(core)
    assert len(as_i32(step.chunk_slots)) == 0
    assert len(as_i32(step.joined)) == 2
    assert again.prefilled is not None
    assert again.prefilled.cached_tokens == 8
    core.drain()
    assert got(again) == wanted(again)


def test_a_prompt_owns_no_twin_of_its_pages() -> None:
    """Log-probs make a cached prompt be computed again; with a twin of each page owned its samples would not fit."""
    core = SmallCore(num_pages=9, max_seqs=2)
    prompt = list(range(18))
    core.submit(submit(0, prompt, max_tokens=1))
    core.drain()
    scored = TokenSampling(num_prompt_logprobs=0)
    received = core.submit(submit(1, prompt, n=2, max_tokens=2, sampling=scored))
    core.drain()
    assert got(received) == wanted(received)
    assert core.stats.num_preemptions == 0
