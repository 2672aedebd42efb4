from __future__ import annotations

import asyncio

import aiohttp
import msgspec
import pytest
from aiohttp import web

from tests.drivers.web_server import web_server
from tests.fakes.scheduler import READY, FakeScheduler
from toka_async.bench import rates
from toka_async.bench.loads.served import BenchError
from toka_async.bench.rates import Rates, counters, sum_generated, watch_rates

LARGE = msgspec.structs.replace(READY, num_pages=8192, max_context=20000)


async def test_a_server_without_requests_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though reading its counters is counted, too."""
    monkeypatch.setattr(rates, "INTERVAL", 0.005)
    monkeypatch.setattr(rates, "SETTLE", 60.0)
    async with web_server(FakeScheduler()) as server, aiohttp.ClientSession() as session, asyncio.timeout(60):
        first = await counters(session, server.url)
        last = await rates.wait_for_counters(session, server.url)
    assert last["toka:http_requests_total"] > first.get("toka:http_requests_total", 0)
    assert rates.select_ours(last).items() >= {
        item for item in rates.select_ours(first).items() if not item[0].startswith("http")
    }


async def test_the_servers_counters() -> None:
    scheduler = FakeScheduler(ready=LARGE)
    async with web_server(scheduler) as server, aiohttp.ClientSession() as session:
        await server.ok("/v1/completions", {"prompt": "x", "max_tokens": 9})
        assert sum_generated(await counters(session, server.url)) == scheduler.generated == 9
        async with watch_rates(session, server.url) as rates:
            await server.ok("/v1/completions", {"prompt": "x", "max_tokens": 9})
        assert rates.tokens[0] >= 9


async def test_a_server_without_counters() -> None:
    async def models(_request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "x"}]})

    app = web.Application()
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with aiohttp.ClientSession() as session:
            assert await counters(session, url) == {}
            with pytest.raises(BenchError, match="--plot"):
                async with watch_rates(session, url):
                    pass
    finally:
        await runner.cleanup()


def test_tokens_over_time() -> None:
    rates = Rates(times=[0.0, 0.5, 1.0, 1.5, 2.0], tokens=[10, 10, 30, 30, 40])
    assert list(rates.per_second()) == [(0.5, 20.0), (1.5, 10.0)]
