from __future__ import annotations

import asyncio
import time

from toka_async.server.http.rounds import MOST_SECONDS, Rounds


async def test_all_that_waits_is_sent_in_a_later_turn() -> None:
    rounds, sent = Rounds(), list[str]()
    rounds.add(lambda: sent.append("a"))
    rounds.add(lambda: sent.append("b"))
    assert sent == []
    await asyncio.sleep(MOST_SECONDS)
    assert sent == ["a", "b"]


async def test_the_next_round_waits_for_as_long_as_the_last_one_took() -> None:
    """The clock is the machine's: what is tested is that no round begins sooner, however slow the machine."""
    rounds, begins, ends = Rounds(), list[float](), list[float]()

    def send() -> None:
        begins.append(time.monotonic())
        time.sleep(0.01)
        ends.append(time.monotonic())

    for _ in range(3):
        before = len(ends)
        rounds.add(send)
        while len(ends) == before:
            await asyncio.sleep(0.001)
    waits = [begin - end for begin, end in zip(begins[1:], ends[:-1], strict=True)]
    assert min(waits) >= 0.009


async def test_a_long_round_delays_the_next_no_more_than_a_reader_notices() -> None:
    rounds, begins = Rounds(), list[float]()
    rounds.add(lambda: time.sleep(10 * MOST_SECONDS))
    await asyncio.sleep(0.001)
    asked = time.monotonic()
    rounds.add(lambda: begins.append(time.monotonic()))
    while not begins:
        await asyncio.sleep(0)
    assert begins[0] - asked < 9 * MOST_SECONDS


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
