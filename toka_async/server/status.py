"""The status line of a busy server. An idle one has no timer and prints nothing.

Knows the scheduler's counters; knows no requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextvars import Context
from time import monotonic

from toka_async.messages import Stats
from toka_async.server.engine import Engine
from toka_async.server.metrics import usage

logger = logging.getLogger(__name__)


class StatusLine:
    """Writes a line each `interval` seconds (0: never) from `start` until the engine is idle."""

    def __init__(self, engine: Engine, interval: float, write: Callable[[str], None] = logger.info) -> None:
        self._engine = engine
        self._interval = interval
        self._write = write
        self._timer: asyncio.TimerHandle | None = None
        self._before = engine.stats
        self._since = 0.0

    def start(self) -> None:
        """A request has come after an idle time."""
        if self._interval and self._timer is None:
            self._before, self._since = self._engine.stats, monotonic()
            self._call_later()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        stats, now = self._engine.stats, monotonic()
        self._write(status_line(self._before, stats, now - self._since))
        self._before, self._since = stats, now
        self._timer = None
        if self._engine.busy:
            self._call_later()

    def _call_later(self) -> None:
        """In a context of its own: the line is not about the request that came first."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._interval, self._tick, context=Context())


def status_line(before: Stats, after: Stats, seconds: float) -> str:
    """The state in `after`, and rates since `before`."""
    speed = (after.generated_tokens - before.generated_tokens) / seconds
    queries = after.prefix_queries - before.prefix_queries
    hit_rate = (after.prefix_hits - before.prefix_hits) / queries if queries else 0.0
    return (
        f"{after.num_running} running, {after.num_waiting} queued, {speed:,.0f} tokens/s, "
        f"cache {usage(after):.0%} in use, prefix hits {hit_rate:.0%}"
    )
