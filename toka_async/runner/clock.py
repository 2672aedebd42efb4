"""Times the steps of a device: how long each takes, and how long the device waits between steps and for other ranks.

The host launches steps ahead of the device, so events in the device's stream mark where a step begins and ends. A CPU
computes a step while it is launched, so the host's clock does there. Knows nothing of what a step does.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

Mark = torch.cuda.Event | float  # a place in the device's stream, or a time


@dataclass(slots=True)
class StepSpan:
    """The begin and end of a step, and of each time in it in which the device waited for other ranks."""

    begin: Mark
    end: Mark | None = None
    stalls: list[tuple[Mark, Mark]] = field(default_factory=list)


class StepClock:
    """Times the steps of one device."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._last: StepSpan | None = None

    def begin(self) -> StepSpan:
        return StepSpan(self._now())

    def end(self, span: StepSpan) -> StepSpan:
        span.end = self._now()
        return span

    @contextmanager
    def stall(self, span: StepSpan) -> Iterator[None]:
        """Counts what is launched within as a wait for other ranks."""
        begin = self._now()
        yield
        span.stalls.append((begin, self._now()))

    def measure_stalls(self, span: StepSpan) -> float:
        """Returns the seconds in which the device waited for other ranks within a step."""
        return sum(measure_between(begin, end) for begin, end in span.stalls)

    def measure(self, span: StepSpan) -> tuple[float, float]:
        """Returns the seconds that a step took, and those that the device was idle before it.

        Spans must be given in order.
        """
        assert span.end is not None
        seconds, waited = measure_between(span.begin, span.end), 0.0
        if self._last is not None and self._last.end is not None:
            waited = max(0.0, measure_between(self._last.end, span.end) - seconds)
        self._last = span
        return seconds, waited

    def _now(self) -> Mark:
        return mark() if self._on_gpu else time.perf_counter()


def mark() -> torch.cuda.Event:
    """Records this place in the device's current stream."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def measure_between(begin: Mark, end: Mark) -> float:
    """Waits until both marks have happened, and returns the seconds between them."""
    if isinstance(begin, float):
        assert isinstance(end, float)
        return end - begin
    assert not isinstance(end, float)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000.0
