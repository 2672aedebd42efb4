"""What a core keeps of layers with a window, and where prompts begin; the rank refuses what it does not find."""

from __future__ import annotations

import pytest

from tests.drivers.core import CoreDriver, Received
from tests.drivers.page_rank import PageRank, submit
from tests.drivers.small_core import got, wanted
from toka_async.messages import Ready

SIZE = 4
WINDOW = 10
SPAN = 4  # pages that a token sees at most


def make_driver(
    num_window_pages: int = 40,
    num_pages: int = 200,
    max_tokens: int = 64,
    max_seqs: int = 8,
    until_full: bool = False,
    group_min_seqs: int = 0,
) -> CoreDriver:
    ready = Ready(
        num_pages=num_pages,
        page_size=SIZE,
        max_seqs=max_seqs,
        max_context=800,
        vocab_size=23,
        num_window_pages=num_window_pages,
        window=WINDOW,
    )
    rank = PageRank(ready)
    return CoreDriver(ready, max_tokens=max_tokens, rank=rank, until_full=until_full, group_min_seqs=group_min_seqs)


def ask(driver: CoreDriver, *prompts: list[int], n: int = 1, max_tokens: int = 3) -> list[Received]:
    first = len(driver.received)
    return [driver.submit(submit(first + i, prompt, n=n, max_tokens=max_tokens)) for i, prompt in enumerate(prompts)]


def run(driver: CoreDriver, *prompts: list[int], n: int = 1, max_tokens: int = 3) -> list[int]:
    """Runs prompts together to their right ends; returns how many tokens of each were found."""
    received = ask(driver, *prompts, n=n, max_tokens=max_tokens)
    driver.drain()
    driver.core.check()
    assert [got(each) for each in received] == [wanted(each) for each in received]
    assert driver.stats.window_pages_used == 0
    return [each.prefilled.cached_tokens for each in received if each.prefilled is not None]


def test_a_long_sequence_holds_no_more_than_a_window() -> None:
    driver = make_driver(num_window_pages=SPAN + 2)
    (received,) = ask(driver, [7], max_tokens=600)
    most = 0
    while driver.turn():
        most = max(most, driver.core._running.cache.windows.num_used)  # type: ignore[union-attr]
    assert got(received) == wanted(received)
    assert most == SPAN
    assert driver.stats.num_preemptions == 0


def test_a_long_prompt_goes_through_few_window_pages() -> None:
    """In chunks as long as these allow, though a step has room for more."""
    driver = make_driver(num_window_pages=SPAN + 2)
    assert run(driver, [i % 23 for i in range(500)], max_tokens=30) == [0]
    assert driver.stats.num_preemptions == 0


def test_the_whole_prompt_is_found_while_its_end_is_there() -> None:
    driver = make_driver()
    prompt = [*range(23)]
    assert run(driver, prompt) == [0]
    assert run(driver, [*prompt, 1, 2]) == [20]
    assert run(driver, [*prompt, 1, 2, 3]) == [24]


def test_a_hit_is_cut_back_to_where_the_window_is() -> None:
    """The tree knows all of a prompt. Its beginning was used lately; of the rest, others took the window pages."""
    driver = make_driver(num_window_pages=16)
    prompt = [i % 23 for i in range(60)]
    run(driver, prompt)
    assert run(driver, prompt[:21]) == [20]
    run(driver, [5] * 36)
    cached = driver.stats.pages_cached
    assert run(driver, prompt[:50]) == [20]
    assert driver.stats.pages_cached == cached, "12 of its pages are known and computed again in their place"
    assert run(driver, prompt[:50]) == [48]


@pytest.mark.parametrize("max_tokens", [8, 9, 11, 13, 27])
def test_chunks_cut_anywhere(max_tokens: int) -> None:
    driver = make_driver(max_tokens=max_tokens)
    prompt = [i % 23 for i in range(51)]
    run(driver, prompt, prompt[:30], n=2)
    assert run(driver, [*prompt, 5]) == [48]


def test_samples_share_their_prompts_window() -> None:
    driver = make_driver(num_window_pages=20, group_min_seqs=2)
    assert run(driver, [*range(22)], n=8, max_tokens=40) == [0]
    assert driver.stats.num_preemptions == 0


def test_window_pages_run_short_before_others() -> None:
    """Admitted while they are free, sequences make way and are computed again."""
    driver = make_driver(num_window_pages=9, until_full=True)
    run(driver, *([i, *range(9)] for i in range(6)), max_tokens=40)
    assert driver.stats.num_preemptions > 0


def test_admission_foresees_window_pages() -> None:
    driver = make_driver(num_window_pages=24)
    run(driver, *([i, *range(9)] for i in range(12)), max_tokens=40)
    assert driver.stats.num_preemptions == 0


def test_prompts_that_wait_for_each_other_do_not_wait_for_ever() -> None:
    """Each holds a part of what the first would need to go on."""
    driver = make_driver(num_window_pages=SPAN + 2, max_tokens=12, until_full=True)
    run(driver, *([i] * 30 for i in range(5)), max_tokens=2)
    run(driver, *([i] * 30 for i in range(5, 9)), n=3, max_tokens=20)
