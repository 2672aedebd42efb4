from __future__ import annotations

import asyncio
from typing import Any

import pytest

from toka_async.server.http.rounds import EVENT_SECONDS, MOST_SECONDS, Rounds


async def test_all_that_waits_is_sent_in_a_later_turn() -> None:
    rounds, sent = Rounds(), list[str]()
    rounds.add(lambda: sent.append("a"))
    rounds.add(lambda: sent.append("b"))
    assert sent == []
    await asyncio.sleep(MOST_SECONDS)
    assert sent == ["a", "b"]


@pytest.mark.parametrize(
    ("num_streams", "took", "waits"),
    [
        (1000, 0.010, 0.010),  # as long as it took
        (1000, 1.0, MOST_SECONDS),  # no longer than readers notice
        (64, 0.010, 64 * EVENT_SECONDS),  # no longer than further events would take: tokens took the time
        (1, 0.0, 0.0),
    ],
)
async def test_a_round_delays_the_next(
    num_streams: int, took: float, waits: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, delays, sent = [100.0], list[float](), list[float]()
    monkeypatch.setattr("toka_async.server.http.rounds.monotonic", lambda: now[0])
    loop = asyncio.get_running_loop()
    call_later = loop.call_later

    def note(delay: float, *call: Any) -> asyncio.TimerHandle:
        delays.append(delay)
        return call_later(0, *call)

    monkeypatch.setattr(loop, "call_later", note)

    def send() -> None:
        now[0] += took / num_streams
        sent.append(now[0])

    rounds = Rounds()
    for _ in range(2):
        for _ in range(num_streams):
            rounds.add(send)
        while len(sent) < num_streams:
            await asyncio.sleep(0)
        sent.clear()
    assert delays == pytest.approx([0.0, waits])


async def test_an_error_is_reported_and_ends_nothing_else() -> None:
    reported, sent = list[dict[str, object]](), list[str]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    rounds = Rounds()

    def fail() -> None:
        raise IndexError

    rounds.add(fail)
    rounds.add(lambda: sent.append("b"))
    await asyncio.sleep(MOST_SECONDS)
    assert sent == ["b"]
    assert isinstance(reported[0]["exception"], IndexError)
