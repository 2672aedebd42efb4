"""Which states a core keeps, and where prompts begin with them; the rank refuses every wrong one."""

from __future__ import annotations

from tests.drivers.core import CoreDriver, Received
from tests.drivers.page_rank import submit
from toka_async.messages import Ready

SIZE = 4


def make_driver(num_snapshots: int = 8, max_tokens: int = 64, max_seqs: int = 8) -> CoreDriver:
    ready = Ready(
        num_pages=64,
        page_size=SIZE,
        max_seqs=max_seqs,
        max_context=200,
        vocab_size=23,
        num_snapshots=num_snapshots,
    )
    return CoreDriver(ready, max_tokens=max_tokens)


def run(driver: CoreDriver, *prompts: list[int], n: int = 1) -> list[int]:
    """Runs prompts together; returns how many tokens of each were found."""
    first = len(driver.received)
    received: list[Received] = [
        driver.submit(submit(first + i, prompt, n=n, max_tokens=3)) for i, prompt in enumerate(prompts)
    ]
    driver.drain()
    driver.core.check()
    assert all(each.prefilled is not None for each in received)
    return [each.prefilled.cached_tokens for each in received if each.prefilled is not None]


def test_a_prompt_begins_at_the_last_full_page_of_one_before() -> None:
    driver = make_driver()
    prompt = [*range(11)]
    assert run(driver, prompt) == [0]
    assert run(driver, [*prompt, 1, 2, 3]) == [8]
    assert run(driver, [*prompt, 1, 2, 3]) == [12]
    assert driver.stats.snapshots_cached == 2
    assert driver.stats.snapshots_used == 0


def test_where_prompts_part_a_state_is_kept_for_the_third() -> None:
    """The first keeps one at its end; the second finds pages without a state, and keeps one where they end."""
    driver = make_driver()
    common = [*range(10)]
    found = [run(driver, [*common, 20 + i, *range(9)])[0] for i in range(3)]
    assert found == [0, 0, 8]


def test_samples_start_from_their_prompts_state() -> None:
    """It lies within a page, or at the end of one, where the next prompt begins with it."""
    driver = make_driver()
    assert run(driver, [*range(10)], n=3) == [0]
    assert run(driver, [*range(10)], n=3) == [8]
    assert run(driver, [*range(9)], n=3) == [8]
    assert run(driver, [7], n=3) == [0]
    assert driver.stats.prompt_tokens == 9 + 1


def test_one_snapshot_suffices() -> None:
    """Prompts of several samples take turns with it; what ends in time is not kept."""
    driver = make_driver(num_snapshots=1)
    prompts = [[i, *range(8)] for i in range(4)]
    run(driver, *prompts, n=3)
    assert driver.stats.num_snapshots == 1
    assert driver.stats.snapshots_used == 0


def test_chunks_cut_anywhere_keep_the_same_states() -> None:
    for max_tokens in (1, 2, 3, 5, 7):
        driver = make_driver(max_tokens=max_tokens, max_seqs=1)
        assert run(driver, [*range(13)]) == [0]
        assert run(driver, [*range(13), 5]) == [12]


def test_without_a_state_no_prefix_is_found() -> None:
    """The pages are there, but all snapshots are of other prompts by now."""
    driver = make_driver(num_snapshots=1)
    run(driver, [*range(11)])
    run(driver, [9, *range(11)])
    assert run(driver, [*range(11)]) == [0]
