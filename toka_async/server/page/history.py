"""Keeps the replicas' statistics of the last minutes, for a page that shows them as curves.

Statistics are kept as they arrive: an idle server keeps nothing and needs no timer. Forecasts are requested only while
a page is open. Knows statistics; knows no HTTP.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import monotonic

import msgspec

from toka_async.messages import Forecast
from toka_async.server.engine.replicas import Replicas

INTERVAL = 0.5  # seconds between two points while statistics arrive
NUM_POINTS = 1200
ASK_EVERY = 0.75  # seconds
NUM_FORECASTS = 180


class PageForecast(msgspec.Struct, frozen=True, kw_only=True):
    """Forecast pages at evenly spaced steps, from `step` on for `steps` of them, as expected at time `at`."""

    at: int
    step: int
    steps: int
    pages: list[int]
    limit: int


class CacheHistory(msgspec.Struct, frozen=True, kw_only=True):
    """One replica's cache: columns beside those of PageHistory, and its forecasts."""

    steps: list[int]
    pages_used: list[int]
    pages_cached: list[int]
    forecasts: list[PageForecast]


class PageHistory(msgspec.Struct, frozen=True, kw_only=True):
    """Columns with one value per point: `at` is in milliseconds of the server's own clock; counters only grow."""

    at: list[int]
    generated_tokens: list[int]
    prompt_tokens: list[int]
    prefix_queries: list[int]
    prefix_hits: list[int]
    first_tokens: list[int]
    first_token_seconds: list[float]
    running: list[int]
    waiting: list[int]
    caches: list[CacheHistory]


@dataclass(slots=True, frozen=True)
class HistoryPoint:
    """All values at one time. totals: PageHistory's columns after `at`. caches: CacheHistory's first columns."""

    at: int
    totals: tuple[float, ...]
    caches: tuple[tuple[int, int, int], ...]


class ReplicaHistory:
    """A bounded number of points and forecasts of the replicas.

    replicas: call back when statistics arrive. first_tokens: returns how many requests had their first token so far,
    and the sum of their seconds.
    """

    def __init__(
        self,
        replicas: Replicas,
        first_tokens: Callable[[], tuple[int, float]],
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._replicas = replicas
        self._first_tokens = first_tokens
        self._clock = clock
        self._began = clock()
        self._points: deque[HistoryPoint] = deque(maxlen=NUM_POINTS)
        self._lives = [replica.life for replica in replicas.replicas]
        self._forecasts: list[deque[PageForecast]] = [deque(maxlen=NUM_FORECASTS) for _ in self._lives]
        self._asked_at = float("-inf")
        self._points.append(self._point(0))
        replicas.on_news.append(self.add)

    @property
    def now(self) -> int:
        """Returns milliseconds."""
        return round((self._clock() - self._began) * 1000)

    def add(self, index: int) -> None:
        """Records a replica's new statistics."""
        now, replica = self.now, self._replicas.replicas[index]
        if (forecast := replica.stats.forecast) is not None:
            self._add_forecast(index, now, replica.stats.num_steps, forecast)
        interval, last = round(INTERVAL * 1000), self._points[-1]
        if now - last.at >= interval:
            if now - last.at > 2 * interval:  # the values were constant for a while
                self._points.extend(replace(last, at=at) for at in (last.at + interval, now - interval))
            self._points.append(self._point(now))
        elif not any(each.stats.num_running for each in self._replicas.replicas):
            self._points[-1] = self._point(now)  # this may be the last point for long

    async def refresh(self) -> None:
        """Asks the replicas for statistics and forecasts, at most every ASK_EVERY seconds for all viewers."""
        if (now := self._clock()) - self._asked_at >= ASK_EVERY:
            self._asked_at = now
            await self._replicas.refresh(forecast=True)

    def since(self, after: int) -> PageHistory:
        points: deque[HistoryPoint] = deque()
        for point in reversed(self._points):
            if point.at <= after:
                break
            points.appendleft(point)
        num_totals = len(PageHistory.__struct_fields__) - 2
        totals = list(zip(*(point.totals for point in points), strict=True)) or [()] * num_totals
        caches = list(zip(*(point.caches for point in points), strict=True)) or [()] * len(self._forecasts)
        return PageHistory(
            at=[point.at for point in points],
            **{name: list(column) for name, column in zip(PageHistory.__struct_fields__[1:-1], totals, strict=True)},
            caches=[
                CacheHistory(
                    steps=[row[0] for row in rows],
                    pages_used=[row[1] for row in rows],
                    pages_cached=[row[2] for row in rows],
                    forecasts=[each for each in forecasts if each.at > after],
                )
                for rows, forecasts in zip(caches, self._forecasts, strict=True)
            ],
        )

    def _point(self, now: int) -> HistoryPoint:
        stats, (num_first, seconds) = self._replicas.stats, self._first_tokens()
        each = [replica.stats for replica in self._replicas.replicas]
        return HistoryPoint(
            now,
            (
                stats.generated_tokens,
                stats.prompt_tokens,
                stats.prefix_queries,
                stats.prefix_hits,
                num_first,
                round(seconds, 4),
                stats.num_running,
                stats.num_waiting,
            ),
            tuple((one.num_steps, one.pages_used, one.pages_cached) for one in each),
        )

    def _add_forecast(self, index: int, now: int, step: int, forecast: Forecast) -> None:
        forecasts, life = self._forecasts[index], self._replicas.replicas[index].life
        if life != self._lives[index]:  # a restarted replica counts its steps from 0
            forecasts.clear()
            self._lives[index] = life
        if any(forecast.pages):
            forecasts.append(
                PageForecast(at=now, step=step, steps=forecast.steps, pages=list(forecast.pages), limit=forecast.limit)
            )
