from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import msgspec

from tests.fakes.scheduler import READY
from toka_async.messages import AskStats, Forecast, Stats, ToScheduler
from toka_async.server.engine.replicas import Replicas
from toka_async.server.page.history import NUM_FORECASTS, NUM_POINTS, ReplicaHistory

FORECAST = Forecast(steps=4, pages=(3, 5, 0), limit=9)


class Sent(list[ToScheduler]):
    """An outbox that keeps what is sent."""

    def send(self, message: ToScheduler) -> None:
        self.append(message)

    def close(self) -> None: ...


@dataclass
class Case:
    """Two replicas, and a clock that stands."""

    now: float = 100.0
    outboxes: list[Sent] = field(default_factory=lambda: [Sent(), Sent()])

    def __post_init__(self) -> None:
        self.replicas = Replicas(self.outboxes)
        for index in range(2):
            self.replicas.on_ready(msgspec.structs.replace(READY, replica=index))
        self.history = ReplicaHistory(self.replicas, lambda: (3, 0.5), clock=lambda: self.now)

    def say(self, later: float, **fields: object) -> None:
        self.now += later
        self.replicas.on_stats(msgspec.structs.replace(Stats(), **fields))


def test_points_are_of_all_replicas() -> None:
    case = Case()
    case.say(1.0, generated_tokens=5, num_running=2, num_steps=7, pages_used=3)
    case.say(1.0, generated_tokens=10, num_running=1, num_steps=8, pages_used=4, pages_cached=1, replica=1)
    seen = case.history.since(-1)
    assert seen.at == [0, 1000, 2000]
    assert seen.generated_tokens == [0, 5, 15]
    assert seen.running == [0, 2, 3]
    assert seen.first_tokens == [3, 3, 3]
    assert seen.first_token_seconds == [0.5, 0.5, 0.5]
    assert [cache.steps for cache in seen.caches] == [[0, 7, 7], [0, 0, 8]]
    assert [cache.pages_used for cache in seen.caches] == [[0, 3, 3], [0, 0, 4]]
    assert [cache.pages_cached for cache in seen.caches] == [[0, 0, 0], [0, 0, 1]]
    assert case.history.since(1000).generated_tokens == [15]
    nothing = case.history.since(2000)
    assert (nothing.at, nothing.waiting, [cache.steps for cache in nothing.caches]) == ([], [], [[], []])


def test_a_few_a_second_and_the_last_of_all() -> None:
    """What comes between two points is told by the next, unless there may be none."""
    case = Case()
    case.say(1.0, generated_tokens=1, num_running=1)
    case.say(0.25, generated_tokens=2, num_running=1)
    assert case.history.since(-1).generated_tokens == [0, 1]
    case.say(0.125, generated_tokens=3, num_running=0)
    seen = case.history.since(-1)
    assert (seen.at, seen.generated_tokens, seen.running) == ([0, 1375], [0, 3], [0, 0])


def test_an_idle_time_is_flat() -> None:
    case = Case()
    case.say(1.0, generated_tokens=100)
    case.say(60.0, generated_tokens=200)
    seen = case.history.since(-1)
    assert seen.at == [0, 1000, 1500, 60500, 61000]
    assert seen.generated_tokens == [0, 100, 100, 100, 200]


def test_it_is_bounded() -> None:
    case = Case()
    for number in range(NUM_POINTS + 100):
        case.say(0.5, num_steps=number, num_running=1, forecast=FORECAST)
    seen = case.history.since(-1)
    assert len(seen.at) == NUM_POINTS
    assert len(seen.caches[0].forecasts) == NUM_FORECASTS
    assert seen.caches[0].steps[-1] == NUM_POINTS + 99


async def test_forecasts_are_asked_for_by_who_looks() -> None:
    case = Case()
    looking = [asyncio.create_task(case.history.refresh()) for _ in range(5)]  # five pages
    await asyncio.sleep(0)
    assert case.outboxes == [[AskStats(number=1, forecast=True)]] * 2
    for replica in range(2):
        case.say(0.0, replica=replica, answers=1, forecast=FORECAST, num_steps=3)
    await asyncio.gather(*looking)
    assert [len(cache.forecasts) for cache in case.history.since(-1).caches] == [1, 1]
    await case.history.refresh()  # it is not a second ago
    assert [len(outbox) for outbox in case.outboxes] == [1, 1]
    case.now += 1.0
    case.replicas.lose(0, 1, "it was killed", Sent())
    looking = [asyncio.create_task(case.history.refresh())]
    await asyncio.sleep(0)
    case.say(0.0, replica=1, answers=2)
    await asyncio.gather(*looking)
    assert [len(outbox) for outbox in case.outboxes] == [1, 2]


def test_forecasts_of_a_life() -> None:
    case = Case()
    case.say(1.0, num_steps=70, forecast=FORECAST)
    case.say(1.0, num_steps=80, forecast=Forecast(steps=1, pages=(0, 0), limit=9))  # of nothing
    case.say(1.0, num_steps=75, forecast=FORECAST, replica=1)
    (one,), (other,) = (cache.forecasts for cache in case.history.since(-1).caches)
    assert (one.at, one.step, one.steps, one.pages, one.limit) == (1000, 70, 4, [3, 5, 0], 9)
    assert (other.at, other.step) == (3000, 75)
    assert [cache.forecasts for cache in case.history.since(1000).caches] == [[], [other]]
    case.replicas.lose(0, 1, "it was killed", Sent())
    case.say(1.0, num_steps=2, forecast=FORECAST, life=1)
    assert [each.step for each in case.history.since(-1).caches[0].forecasts] == [2]
