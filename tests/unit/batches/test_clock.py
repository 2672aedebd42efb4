from __future__ import annotations

from toka_async.batches.clock import PATIENCE, TOLERANCE, SettledClock

DAY = 86400.0


class Clocks:
    """A wall and a steady clock, and the one that is made of them."""

    def __init__(self) -> None:
        self.wall, self.steady = 1_000_000.0, 50.0
        self.settled = SettledClock(lambda: self.wall, lambda: self.steady)

    def after(self, seconds: float, jump: float = 0.0) -> float:
        """What it says then, compared with the wall's first."""
        self.wall += seconds + jump
        self.steady += seconds
        return self.settled() - 1_000_000.0


def test_it_goes_on_with_the_wall() -> None:
    clocks = Clocks()
    assert clocks.after(0.0) == 0.0
    assert clocks.after(5 * DAY) == 5 * DAY


def test_small_adjustments_are_followed() -> None:
    clocks = Clocks()
    assert clocks.after(10.0, jump=TOLERANCE / 2) == 10.0 + TOLERANCE / 2
    assert clocks.after(10.0, jump=-TOLERANCE) == 20.0 - TOLERANCE / 2


def test_a_jump_forward_that_is_taken_back_never_was() -> None:
    clocks = Clocks()
    assert clocks.after(60.0, jump=40 * DAY) == 60.0
    assert clocks.after(PATIENCE - 1.0) == 60.0 + PATIENCE - 1.0
    assert clocks.after(60.0, jump=-40 * DAY) == 120.0 + PATIENCE - 1.0
    assert clocks.after(PATIENCE, jump=40 * DAY) == 120.0 + 2 * PATIENCE - 1.0  # a new one, seen for the first time


def test_a_jump_forward_that_lasts_is_believed() -> None:
    clocks = Clocks()
    assert clocks.after(1.0, jump=40 * DAY) == 1.0
    assert clocks.after(PATIENCE) == 40 * DAY + 1.0 + PATIENCE
    assert clocks.after(1.0) == 40 * DAY + 2.0 + PATIENCE


def test_a_jump_back_is_believed_at_once() -> None:
    clocks = Clocks()
    assert clocks.after(1.0, jump=-40 * DAY) == 1.0 - 40 * DAY
    assert clocks.after(1.0, jump=40 * DAY) == 2.0 - 40 * DAY
    assert clocks.after(PATIENCE) == 2.0 + PATIENCE
