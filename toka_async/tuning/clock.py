"""Measures how long the device takes. All measurements at a start use this clock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from toka_async.runner.clock import mark, measure_between

HEAD_START = 100_000  # cycles of the device in which the host launches one kernel
_LAUNCH = 50e-6  # seconds of that, about
_MOST_LAUNCHES = 40  # of a call: a longer first one has compiled kernels
_MOST_AHEAD = 8  # calls: the device would rest too long


def time_calls(call: Callable[[], object], num_calls: int = 1, head_start: int = 0) -> float:
    """Returns the milliseconds of the calls on the current stream, by events.

    head_start: so many kernels are launched while the device still waits, so that the host's time is not counted.
    """
    if head_start:
        torch.cuda._sleep(HEAD_START * head_start)  # type: ignore[no-untyped-call]
    begin = mark()
    for _ in range(num_calls):
        call()
    return 1000 * measure_between(begin, mark())


def time_alone(call: Callable[[], object], num_calls: int = 1) -> float:
    """Returns the milliseconds of the calls on an idle device, from the first launch to the last end."""
    torch.cuda.synchronize()
    return time_calls(call, num_calls)


def time_launches(call: Callable[[], object], num_calls: int) -> float:
    """As `time_calls`, of calls that launch several kernels: the head start is what the host needs for them."""
    launches = min(_MOST_LAUNCHES, math.ceil(time_host(call) / _LAUNCH))
    return time_calls(call, num_calls, head_start=launches * min(num_calls, _MOST_AHEAD))


def time_host(call: Callable[[], object]) -> float:
    """Returns the seconds that the host takes for a call."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
