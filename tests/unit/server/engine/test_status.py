from __future__ import annotations

import asyncio
import logging

import pytest

from tests.drivers.until import until
from tests.drivers.web_server import web_server
from tests.fakes.scheduler import FakeScheduler
from toka_async.logs import request_id
from toka_async.messages import Stats
from toka_async.server.engine.engine import Engine
from toka_async.server.engine.status import StatusLine, status_line


def test_the_line() -> None:
    before = Stats(generated_tokens=100, prefix_queries=10, prefix_hits=10)
    after = Stats(
        num_running=1234,
        num_waiting=2,
        generated_tokens=10_100,
        prefix_queries=20,
        prefix_hits=15,
        pages_used=1,
        pages_cached=3,
        num_pages=4,
    )
    assert status_line(before, after, 5.0, 4.0, is_idle=False) == (
        "1,234 running, 2 queued, 2,500 tokens/s, cache 25% in use, 50% of prompt tokens shared or cached"
    )
    assert status_line(after, after, 5.0, 0.0, is_idle=False) == "1,234 running, 2 queued, 0 tokens/s, cache 25% in use"


def test_the_line_after_a_lone_request() -> None:
    """It took half a second of five: that is its speed, and nothing runs."""
    line = status_line(Stats(), Stats(generated_tokens=10), 5.0012, 0.5, is_idle=True)
    assert line == "idle again: 10 tokens in 0.5 of the last 5 s, 20 tokens/s"


async def test_the_line_is_of_its_moment() -> None:
    """What the scheduler said last is old: it is asked."""
    lines: asyncio.Queue[str] = asyncio.Queue()
    scheduler = FakeScheduler(held=True)
    async with web_server(scheduler) as server:
        status = StatusLine(server.engine, 0.001, lines.put_nowait)
        answer = asyncio.create_task(server.ok("/v1/completions", {"prompt": "x", "n": 3, "max_tokens": 2}))
        await until(lambda: server.engine.num_requests == 1)
        scheduler.step()
        server.engine.on_messages([Stats(num_running=0)])
        status.start()
        assert (await lines.get()).startswith("1 running, ")
        status.stop()
        scheduler.step()
        await answer


async def test_lines_while_busy_and_none_while_idle() -> None:
    lines: list[str] = []
    others: asyncio.Queue[str] = asyncio.Queue()
    async with web_server(FakeScheduler(held=True)) as server, web_server(FakeScheduler(held=True)) as other:
        body = {"prompt": "x", "max_tokens": 1}
        answers = [asyncio.create_task(each.ok("/v1/completions", body)) for each in (server, other)]
        await until(lambda: server.engine.num_requests == other.engine.num_requests == 1)
        stopped = StatusLine(server.engine, 0.001, pytest.fail)
        stopped.start()
        stopped.stop()
        StatusLine(server.engine, 0.0, pytest.fail).start()  # never
        StatusLine(server.engine, 0.001, lines.append).start()
        await until(lambda: len(lines) >= 2)
        server.scheduler.step()
        await answers[0]
        await until(lambda: lines[-1].startswith("idle again"))
        count = len(lines)
        busy = StatusLine(other.engine, 0.001, others.put_nowait)
        busy.start()
        for _ in range(3):
            await others.get()
        assert len(lines) == count
        busy.stop()
        other.scheduler.step()
        await answers[1]


async def test_a_line_is_about_no_request() -> None:
    """Not even about the one with which the server's work began."""
    engine, about, seen = Engine([FakeScheduler(held=True)], 1), [], asyncio.Event()

    def write(_line: str) -> None:
        about.append(request_id.get())
        seen.set()

    status = StatusLine(engine, 0.001, write)
    token = request_id.set("the first")
    status.start()
    request_id.reset(token)
    await seen.wait()
    assert about == [""]


async def test_the_app_starts_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with web_server(log_stats_interval=0.001) as server:
        assert (await server.ok("/v1/completions", {"prompt": "x"}))["choices"]
        await until(lambda: "tokens/s" in caplog.text)
