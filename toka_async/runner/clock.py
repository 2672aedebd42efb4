"""How long steps take on the device, and how long it waited between them, and within them for other ranks.

Steps are launched ahead of the device, so the host's clock says little: events on the device's stream mark where a
step begins and ends. On a CPU, where steps are computed as they are launched, the host's clock does. Knows no steps'
contents.
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
    """Begin and end of a step, and of each time in it that the device waited for other ranks."""

    begin: Mark
    end: Mark | None = None
    stalls: list[tuple[Mark, Mark]] = field(default_factory=list)


class StepClock:
    """Times the steps of one device. copies: a stream beside the one that computes; None on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self.copies: torch.cuda.Stream | None = torch.cuda.Stream(device) if self._on_gpu else None  # type: ignore[no-untyped-call]
        self._last: StepSpan | None = None

    def begin(self) -> StepSpan:
        return StepSpan(self._now())

    def end(self, span: StepSpan) -> StepSpan:
        span.end = self._now()
        return span

    @contextmanager
    def stalled(self, span: StepSpan) -> Iterator[None]:
        """What the device is told in here is to wait for other ranks."""
        begin = self._now()
        yield
        span.stalls.append((begin, self._now()))

    def stall_seconds(self, span: StepSpan) -> float:
        """How long the device waited within a step that has ended."""
        return sum(seconds_between(begin, end) for begin, end in span.stalls)

    def seconds(self, span: StepSpan) -> tuple[float, float]:
        """How long a step that has ended took, and how long the device had waited for it.

        Spans must be given in order.
        """
        assert span.end is not None
        seconds, waited = seconds_between(span.begin, span.end), 0.0
        if self._last is not None and self._last.end is not None:
            waited = max(0.0, seconds_between(self._last.end, span.end) - seconds)
        self._last = span
        return seconds, waited

    def _now(self) -> Mark:
        return mark() if self._on_gpu else time.perf_counter()


def mark() -> torch.cuda.Event:
    """This place in the device's current stream."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def seconds_between(begin: Mark, end: Mark) -> float:
    """Waits until both have happened, as an event's `elapsed_time` needs it."""
    if isinstance(begin, float):
        assert isinstance(end, float)
        return end - begin
    assert not isinstance(end, float)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000.0
