from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import pytest

from tests.drivers.direct import direct_server, runs, wait_for_runs
from tests.drivers.until import SECONDS, turns, until
from tests.fakes.scheduler import FakeScheduler
from tests.processes.cuttable import Cuttable
from toka_async.client import Client, ConnectionLostError, Pool

PROMPT = [1, 2, 3]


@pytest.mark.parametrize("text", [False, True])
async def test_a_connection_that_breaks_costs_nothing_and_runs_nothing_twice(text: bool) -> None:
    async with (
        direct_server(FakeScheduler(held=True)) as world,
        Cuttable(world.url) as cuttable,
        Client(cuttable.url) as client,
    ):
        calls = [asyncio.create_task(client.generate(PROMPT, max_tokens=3, seed=i, text=text)) for i in range(5)]
        await wait_for_runs(world.scheduler, 5)
        cuttable.cut()
        late = asyncio.create_task(client.generate(PROMPT, max_tokens=3, seed=9, text=text))
        for _ in range(4):
            world.scheduler.step()
            await asyncio.sleep(0)
        async with asyncio.timeout(60):
            results = await asyncio.gather(*calls)
            await wait_for_runs(world.scheduler, 6)
            world.scheduler.held = False
            world.scheduler.step()
            results.append(await late)
        assert [result.samples[0].token_ids.size for result in results] == [3] * 6
        assert runs(world.scheduler) == 6
        assert cuttable.num_connections == 2


async def test_a_stream_goes_on_over_a_new_connection() -> None:
    async with (
        direct_server(FakeScheduler(held=True)) as world,
        Cuttable(world.url) as cuttable,
        Client(cuttable.url) as client,
    ):
        tokens: list[int] = []

        async def read() -> None:
            async for event in client.stream(PROMPT, max_tokens=50, seed=4, text=False):
                tokens.extend(event.token_ids.tolist())

        reading = asyncio.create_task(read())
        await wait_for_runs(world.scheduler, 1)

        def stepped() -> bool:
            world.scheduler.step()
            return len(tokens) >= 5

        async with asyncio.timeout(SECONDS):
            await until(stepped)
            cuttable.cut()
            world.scheduler.held = False
            world.scheduler.step()
            await reading
        assert len(tokens) == 50
        assert runs(world.scheduler) == 1


async def test_a_server_that_comes_back_without_memory_runs_them_again() -> None:
    first = FakeScheduler(held=True)
    async with contextlib.AsyncExitStack() as stack:
        async with direct_server(first) as world:
            address = world.url
            client = await stack.enter_async_context(Client(address))
            call = asyncio.create_task(client.generate(PROMPT, max_tokens=3, text=False))
            begun = client.stream(PROMPT, max_tokens=9, text=False)
            reading = asyncio.create_task(begun.__anext__())
            await wait_for_runs(first, 2)
            first.step()
            async with asyncio.timeout(60):
                await reading
        async with direct_server(bind=address), asyncio.timeout(60):
            assert (await call).samples[0].token_ids.size == 3
            with pytest.raises(ConnectionLostError, match="forgotten"):
                async for _ in begun:
                    pass


async def test_an_engine_that_is_full_is_asked_again() -> None:
    async with direct_server(max_requests=2) as world, Client(world.url) as client:
        results = await asyncio.gather(*(client.generate([i], max_tokens=2, text=False) for i in range(3)))
        assert len(results) == 3


async def test_nobody_answers() -> None:
    for timeout in (None, 0.1):
        with pytest.raises(ConnectionLostError, match=r"^no connection to tcp://127\.0\.0\.1:9: nobody listens there$"):
            async with Client("tcp://127.0.0.1:9", timeout=timeout):
                pass
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ConnectionLostError, match="nobody answers"):
            async with Client(url, timeout=0.1):
                pass
    for nonsense in ("nonsense", "http://127.0.0.1:80", "tcp://"):
        expected = f"^no connection to {nonsense}: .*; expected an address such as tcp://"
        with pytest.raises(ConnectionLostError, match=expected):
            async with Client(nonsense):
                pass


async def test_what_is_no_address_is_one_error() -> None:
    others: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: others.append(context))
    for url in ("127.0.0.1:1", "http://127.0.0.1:1", ""):
        with pytest.raises(ConnectionLostError):
            async with Client(url, timeout=0.3):
                pass
    await turns()
    assert not others


async def test_an_address_that_is_no_text_is_an_error_and_no_hang() -> None:
    """As of a variable of the environment that is not set."""
    url: Any = None
    async with asyncio.timeout(60):
        with pytest.raises(TypeError, match=r"expected an address such as tcp://127.0.0.1:10211, got None"):
            await Client(url).__aenter__()
        with pytest.raises(ConnectionLostError, match="got None"):
            await Pool([url]).__aenter__()


async def test_closing_fails_what_is_open() -> None:
    async with direct_server(FakeScheduler(held=True)) as world:
        async with Client(world.url) as client:
            call = asyncio.create_task(client.generate(PROMPT, max_tokens=5, text=False))
            await wait_for_runs(world.scheduler, 1)
        with pytest.raises(ConnectionLostError):
            await call
        with pytest.raises(ConnectionLostError):
            await client.generate(PROMPT)
        async with asyncio.timeout(60):
            await world.engine.wait_idle()


# ---- keys
