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
from toka_async.server.engine.engine import Engine
from toka_async.server.engine.metrics import usage

logger = logging.getLogger(__name__)


class StatusLine:
    """Writes a line each `interval` seconds (0: never) from `start` until the engine is idle.

    What runs is asked of the schedulers for each line. Rates are of the time in which the engine had requests.
    """

    def __init__(self, engine: Engine, interval: float, write: Callable[[str], None] = logger.info) -> None:
        self._engine = engine
        self._interval = interval
        self._write = write
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._before = engine.stats
        self._since = self._busy_before = 0.0

    def start(self) -> None:
        """A request has come after an idle time."""
        if self._interval and self._timer is None and self._task is None:
            self._begin()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def _begin(self) -> None:
        """An interval; in a context of its own: its line is not about the request that came first."""
        self._before, self._since, self._busy_before = self._engine.stats, monotonic(), self._engine.busy_seconds
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._interval, self._tick, context=Context())

    def _tick(self) -> None:
        self._timer = None
        self._task = asyncio.get_running_loop().create_task(self._tell(), context=Context())

    async def _tell(self) -> None:
        engine = self._engine
        await engine.replicas.refresh()
        busy = engine.busy_seconds - self._busy_before
        self._write(status_line(self._before, engine.stats, monotonic() - self._since, busy, is_idle=not engine.busy))
        self._task = None
        if engine.busy:
            self._begin()


def status_line(before: Stats, after: Stats, seconds: float, busy: float, *, is_idle: bool) -> str:
    """The state in `after`, and what was done since `before`: in `seconds`, of which the engine was `busy`."""
    num_tokens = after.generated_tokens - before.generated_tokens
    speed = f"{num_tokens / busy if busy else 0.0:,.0f} tokens/s"
    queries = after.prefix_queries - before.prefix_queries
    hits = after.prefix_hits - before.prefix_hits
    saved = f", {hits / queries:.0%} of prompt tokens shared or cached" if queries else ""
    if is_idle:
        return f"idle again: {num_tokens:,} tokens in {busy:.3g} of the last {seconds:.3g} s, {speed}{saved}"
    state = f"{after.num_running:,} running, {after.num_waiting:,} queued"
    return f"{state}, {speed}, cache {usage(after):.0%} in use{saved}"
