from __future__ import annotations

import asyncio
from concurrent.futures import CancelledError

import pytest

from tests.drivers.direct import direct_server
from toka_async.client import ConnectionLostError, RequestError, SyncClient
from toka_async.client.base_client import BaseClient

PROMPT = [1, 2, 3]


async def test_a_call_that_comes_while_another_thread_closes_ends_too() -> None:
    def call() -> None:
        client = SyncClient(world.url)
        with client:
            late = client._start(asyncio.Event().wait())
        with pytest.raises(CancelledError):
            late.result(timeout=60)

    async with direct_server() as world:
        await asyncio.to_thread(call)


async def test_the_same_without_asyncio() -> None:
    async with direct_server() as world:
        await asyncio.to_thread(use, world.url)


async def collect_places(client: BaseClient) -> list[int]:
    places: list[int] = []
    await client.generate_each([PROMPT] * 3, lambda place, _result: places.append(place), max_tokens=2)
    return places


def use(url: str) -> None:
    with SyncClient(url) as client:
        result = client.generate(PROMPT, max_tokens=4, seed=1, text=False)
        events = list(client.stream(PROMPT, max_tokens=4, seed=1, text=False))
        assert [int(i) for event in events for i in event.token_ids] == result.samples[0].token_ids.tolist()
        assert len(client.generate_many([PROMPT, PROMPT], max_tokens=2)) == 2
        places = client.start(collect_places).result(timeout=60)
        assert sorted(places) == [0, 1, 2]
        for event in client.stream(PROMPT, max_tokens=300):
            assert event.finish_reason is None
            break
        with pytest.raises(RequestError, match="temperature"):
            client.generate(PROMPT, temperature=-1.0)
    with pytest.raises(ConnectionLostError) as caught, SyncClient("tcp://127.0.0.1:9"):
        pass
    assert {frame.name for frame in caught.traceback} <= {"use", "__enter__", "_run"}, "not the inside of the client"
