from __future__ import annotations

from tests.fakes.clock import Clock
from toka_async.restarts import FIRST_DELAY, LONGEST_DELAY, STEADY, Restarts


def test_delays_grow_until_it_has_served_a_while() -> None:
    clock = Clock()
    restarts = Restarts(clock)
    delays = [restarts.note_lost(1) for _ in range(12)]
    assert delays[:3] == [FIRST_DELAY, 2 * FIRST_DELAY, 4 * FIRST_DELAY]
    assert delays[-1] == LONGEST_DELAY
    assert restarts.note_lost(0) == FIRST_DELAY
    restarts.note_success(1)
    clock.now += STEADY / 2
    assert restarts.note_lost(1) == LONGEST_DELAY
    restarts.note_success(1)
    clock.now += STEADY
    assert restarts.note_lost(1) == FIRST_DELAY
    assert restarts.life(1) == 14


def test_what_is_due() -> None:
    clock = Clock()
    restarts = Restarts(clock)
    assert restarts.time_until_due() is None
    assert restarts.take_due() == []
    restarts.note_lost(0)
    clock.now += FIRST_DELAY / 2
    restarts.note_lost(2)
    assert restarts.time_until_due() == FIRST_DELAY / 2
    clock.now += FIRST_DELAY / 2
    assert restarts.take_due() == [0]
    assert restarts.take_due() == []
    clock.now += FIRST_DELAY
    assert restarts.time_until_due() == 0
    assert restarts.take_due() == [2]
    assert restarts.time_until_due() is None
    assert [restarts.life(replica) for replica in range(3)] == [1, 0, 1]
