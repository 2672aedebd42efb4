from __future__ import annotations

import pytest

from tests.fakes.clock import Clock
from toka_async.transfer.deadline import Deadline
from toka_async.transfer.errors import TransferTimeoutError


def test_a_wait_ends_when_it_is_done_or_too_late() -> None:
    clock = Clock()
    deadline = Deadline(10, clock)
    looks = 0

    def is_done() -> bool:
        nonlocal looks
        looks += 1
        clock.now += 4
        return looks == 2

    deadline.wait_until(is_done, "a broadcast")
    assert deadline.left.total_seconds() == 2
    with pytest.raises(TransferTimeoutError, match="a broadcast did not end within 10 s"):
        deadline.wait_until(is_done, "a broadcast")
    assert 0 < deadline.left.total_seconds() <= 0.001
