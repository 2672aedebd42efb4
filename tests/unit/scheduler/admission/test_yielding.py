from __future__ import annotations

import pytest

from tests.drivers.page_rank import submit
from tests.drivers.small_core import SmallCore, got, wanted

PROMPT = [1, 2, 3, 4, 5]
LOW = 1 << 32


def full(core: SmallCore, count: int, max_tokens: int = 60) -> list[int]:
    """So many requests of low priority that run; their ids."""
    ids = list(range(count))
    for i in ids:
        core.submit(submit(i, [*PROMPT, i], max_tokens=max_tokens, priority=LOW))
    for _ in range(3):
        core.turn()
    return ids


def num_preemptions(core: SmallCore) -> int:
    """As of now: reports are older."""
    return core.core._preemption.num_preemptions


@pytest.mark.parametrize("steps_ahead", [1, 2, 4])
@pytest.mark.parametrize("until_full", [False, True])
def test_a_row_makes_way(steps_ahead: int, until_full: bool) -> None:
    core = SmallCore(num_pages=256, max_seqs=4, steps_ahead=steps_ahead, until_full=until_full)
    low = full(core, 8)
    high = core.submit(submit(99, PROMPT, max_tokens=5))
    num_turns = 0
    while not high.ended:
        core.turn()
        core.core.check()
        num_turns += 1
    assert num_turns <= 8 + steps_ahead
    assert num_preemptions(core) == 1
    assert not any(core.received[i].ended for i in low)
    core.drain()
    assert num_preemptions(core) == 1  # it took the row that was free again
    for received in core.received.values():
        assert got(received) == wanted(received)


def test_the_last_in_order_make_way_and_no_more_than_are_needed() -> None:
    core = SmallCore(num_pages=256, max_seqs=4, steps_ahead=1)
    low = full(core, 4)
    high = [core.submit(submit(100 + i, PROMPT, max_tokens=4)) for i in range(2)]
    core.turn_until(lambda: all(each.ended for each in high))
    assert num_preemptions(core) == 2
    core.turn_until(lambda: core.received[low[1]].ended)
    assert not core.received[low[2]].ended
    core.drain()
    assert num_preemptions(core) == 2
    for received in core.received.values():
        assert got(received) == wanted(received)


def test_equals_do_not_make_way() -> None:
    core = SmallCore(num_pages=256, max_seqs=4, steps_ahead=1)
    full(core, 4, max_tokens=20)
    last = core.submit(submit(99, PROMPT, max_tokens=1, priority=LOW))
    core.turn_until(lambda: last.ended)
    assert all(core.received[i].ended for i in range(4))
    assert num_preemptions(core) == 0


def test_a_higher_priority_is_not_taken_from() -> None:
    """Of three priorities the lowest makes way."""
    core = SmallCore(num_pages=256, max_seqs=2, steps_ahead=1)
    first = core.submit(submit(0, PROMPT, max_tokens=30))
    low = core.submit(submit(1, PROMPT, max_tokens=30, priority=2))
    core.turn()
    for number in range(3):
        core.submit(submit(10 + number, PROMPT, max_tokens=4, priority=1))
    core.turn_until(lambda: first.ended)
    assert not low.ended
    assert num_preemptions(core) == 1
    core.drain()
    assert got(low) == wanted(low)


@pytest.mark.parametrize("until_full", [False, True])
def test_pages_make_way(until_full: bool) -> None:
    """There are rows, but the cache is full: as many yield as it takes, the last in order first."""
    core = SmallCore(num_pages=24, page_size=4, max_seqs=16, steps_ahead=1, until_full=until_full)
    full(core, 8, max_tokens=40)
    high = core.submit(submit(99, [7] * 30, max_tokens=4))
    num_turns = 0
    while not high.ended:
        core.turn()
        core.core.check()
        num_turns += 1
    assert num_turns < 12
    assert not core.received[0].ended
    core.drain()
    for received in core.received.values():
        assert got(received) == wanted(received)


def test_what_fits_takes_nothing() -> None:
    """Work of low priority waits for pages; a small request that comes finds enough."""
    core = SmallCore(num_pages=64, page_size=4, max_seqs=16, steps_ahead=1, until_full=False)
    full(core, 16, max_tokens=50)
    core.submit(submit(98, PROMPT * 8, max_tokens=60, priority=LOW))
    core.turn()
    high = core.submit(submit(99, PROMPT, max_tokens=2))
    core.turn_until(lambda: high.ended)
    assert num_preemptions(core) == 0
    core.drain()


def test_many_samples_take_many_rows() -> None:
    core = SmallCore(num_pages=256, max_seqs=8, max_tokens=32, steps_ahead=1)
    full(core, 8)
    high = core.submit(submit(99, PROMPT, n=6, max_tokens=5))
    core.turn_until(lambda: high.ended)
    assert not any(core.received[i].ended for i in range(8))
    core.drain()
    for received in core.received.values():
        assert got(received) == wanted(received)


def test_no_more_rows_than_a_step_can_start() -> None:
    """Prompts of many steps do not empty the rows long before they can use them."""
    core = SmallCore(num_pages=512, max_seqs=8, max_tokens=16, steps_ahead=1)
    full(core, 8)
    for i in range(6):
        core.submit(submit(100 + i, [i] * 32, max_tokens=4))
    core.turn()
    assert num_preemptions(core) <= 1
    core.drain()
    for received in core.received.values():
        assert got(received) == wanted(received)
