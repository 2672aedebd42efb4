"""How many steps are queued on the ranks: enough to hide the control latency, and no more than waste allows.

A step that comes back must find the next one queued, so the depth is the latency of control in steps, plus one. Every
further step computes one more token for each sequence whose end is found late. Knows times and counts.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

MOST = 16
LEAST = 2  # one runs while the next one waits
WINDOW = 256  # steps whose times are kept
EVERY = 32  # steps between two adaptations
TRANSPORT = 0.0005  # seconds of messages to the ranks and back, which are not measured here
WASTE = 0.02  # share of computed tokens that may be wasted for depth beyond the least


class StepDepth:
    """The depth between `least` and `most`; fixed where they are equal.

    lag: share of a step by which the first rank is ahead of the one that answers, and so needs its next step earlier.

    Attributes:
        depth: steps to have queued.
        idle_seconds: time in which the ranks had nothing queued although there was work.
        histogram: how often a step came back with 0, 1, … steps still queued.
    """

    def __init__(self, least: int = LEAST, most: int = MOST, lag: float = 0.0) -> None:
        self.depth = least
        self.idle_seconds = 0.0
        self.histogram = [0] * (most + 1)
        self._least, self._most = least, most
        self._lag = lag
        self._waste_limit = most
        self._steps: deque[float] = deque(maxlen=WINDOW)
        self._latencies: deque[float] = deque(maxlen=WINDOW)
        self._completed_at: float | None = None
        self._dry = False
        self._num_steps = 0
        self._num_computed = self._num_wasted = 0

    def note_completed(self, now: float, seconds: float, num_queued: int) -> None:
        """Note that a step came back after `seconds` on the ranks, with `num_queued` steps still queued."""
        self.histogram[min(num_queued, self._most)] += 1
        self._steps.append(seconds)
        if self._completed_at is None:
            self._completed_at = now
        self._dry = num_queued == 0
        self._num_steps += 1
        if self._num_steps % EVERY == 0 and self._least < self._most:
            self._adapt()

    def note_sent(self, now: float, has_work: bool) -> None:
        """Note that the steps which follow from completed ones are on their way to the ranks."""
        if self._completed_at is None:
            return
        latency, self._completed_at = now - self._completed_at, None
        self._latencies.append(latency)
        if self._dry and has_work:
            self.idle_seconds += latency
        self._dry = False

    def count_tokens(self, num_tokens: int, num_wasted: int) -> None:
        """Count a step's tokens, `num_wasted` of which belonged to sequences that had ended."""
        self._num_computed += num_tokens
        self._num_wasted += num_wasted

    def _adapt(self) -> None:
        step = max(float(np.median(self._steps)), 1e-6)
        latency = float(np.percentile(self._latencies, 99)) + TRANSPORT if self._latencies else TRANSPORT
        wanted = math.ceil(latency / step + self._lag) + 1
        share = self._num_wasted / max(1, self._num_computed)
        if share > WASTE:
            self._waste_limit = max(self._least, self.depth - 1)
        elif share < WASTE / 2:
            self._waste_limit = min(self._most, self._waste_limit + 1)
        self._num_computed = self._num_wasted = 0
        self.depth = max(self._least, min(wanted, self._most, self._waste_limit))
