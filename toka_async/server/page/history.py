"""What the replicas have said of themselves in the last minutes, for a page that shows it as curves.

It is kept as statistics arrive: an idle server keeps nothing and has no timer. Forecasts are asked for only while
somebody looks. Knows statistics; knows no HTTP.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import monotonic

import msgspec

from toka_async.messages import Forecast
from toka_async.server.engine.replicas import Replicas

INTERVAL = 0.5  # seconds between two points while statistics come
NUM_POINTS = 1200
ASK_EVERY = 0.75  # seconds
NUM_FORECASTS = 180


class PageForecast(msgspec.Struct, frozen=True, kw_only=True):
    """Pages in use at evenly spaced steps, from `step` on for `steps` of them, as was expected at the time `at`."""

    at: int
    step: int
    steps: int
    pages: list[int]
    limit: int


class CacheHistory(msgspec.Struct, frozen=True, kw_only=True):
    """One replica's cache: columns beside those of all, and what was forecast."""

    steps: list[int]
    pages_used: list[int]
    pages_cached: list[int]
    forecasts: list[PageForecast]


class PageHistory(msgspec.Struct, frozen=True, kw_only=True):
    """Columns, one value a point of time: `at` is in milliseconds of the server's own clock, counters only grow."""

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
    """All at one time. totals: as the columns of PageHistory from the second on. caches: as CacheHistory's first."""

    at: int
    totals: tuple[float, ...]
    caches: tuple[tuple[int, int, int], ...]


class ReplicaHistory:
    """Points and forecasts of the replicas, a bounded number of each.

    Args:
        replicas: are asked to tell when their statistics come.
        first_tokens: requests that had their first token up to now, and after how many seconds, all together.
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
        replicas.on_news = self.add

    @property
    def now(self) -> int:
        """Milliseconds."""
        return round((self._clock() - self._began) * 1000)

    def add(self, index: int) -> None:
        """A replica's statistics have come."""
        now, replica = self.now, self._replicas.replicas[index]
        if (forecast := replica.stats.forecast) is not None:
            self._add_forecast(index, now, replica.stats.num_steps, forecast)
        interval, last = round(INTERVAL * 1000), self._points[-1]
        if now - last.at >= interval:
            if now - last.at > 2 * interval:  # nothing has changed for a while
                self._points.extend(replace(last, at=at) for at in (last.at + interval, now - interval))
            self._points.append(self._point(now))
        elif not any(each.stats.num_running for each in self._replicas.replicas):
            self._points[-1] = self._point(now)  # it may be the last one for long

    async def refresh(self) -> None:
        """Somebody looks: what the replicas do now is wanted, and a forecast. However many look, they are asked now and
        then only.
        """
        if (now := self._clock()) - self._asked_at >= ASK_EVERY:
            self._asked_at = now
            await self._replicas.refresh(forecast=True)

    def since(self, after: int) -> PageHistory:
        """Everything later than that."""
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
        if life != self._lives[index]:  # its steps are counted from 0 again
            forecasts.clear()
            self._lives[index] = life
        if any(forecast.pages):
            forecasts.append(
                PageForecast(at=now, step=step, steps=forecast.steps, pages=list(forecast.pages), limit=forecast.limit)
            )
