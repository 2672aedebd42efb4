from __future__ import annotations

import asyncio
import json
from pathlib import Path

import openai

from tests.drivers.until import until
from tests.drivers.web_server import checked_error, web_server
from tests.fakes.scheduler import FakeScheduler, random_tokens
from tests.processes.keyed import ALICE, BOB, KEYS, ask, bearer, ended
from toka_async.messages import Submit
from toka_async.server.access.guard import GUARD
from toka_async.server.http.respond import SERVICE


async def test_requests_and_tokens_of_a_key() -> None:
    async with web_server(FakeScheduler(held=True), keys=KEYS) as server:
        first = asyncio.create_task(ask(server, ALICE, n=2))  # 3 + 2 x 10 tokens
        await until(lambda: server.engine.num_requests)
        status, answer, retry = await ask(server, ALICE, max_tokens=15)
        assert (status, retry) == (429, "1")
        assert "key alice: 1 requests with 23 tokens" in checked_error(answer)["message"]
        second = asyncio.create_task(ask(server, ALICE))
        await until(lambda: server.engine.num_requests >= 2)
        assert (await ask(server, ALICE, max_tokens=1))[0] == 429
        other = asyncio.create_task(ask(server, BOB))
        await until(lambda: server.engine.num_requests >= 3)
        for _ in range(12):
            server.scheduler.step()
        assert [(await each)[0] for each in (first, second, other)] == [200, 200, 200]
        status, answer, _ = await ask(server, ALICE, max_tokens=38)
        assert status == 400
        assert checked_error(answer)["param"] == "max_tokens"
        accounts = server.app[SERVICE].accounts
        assert accounts.total.num_requests == accounts.total.num_tokens == 0
        assert accounts.by_name["key alice"].num_refused == 2


async def test_requests_wait_in_order_for_room() -> None:
    """One at a time of alice's; who waits longest is next; bob is not in their way, nor they in his."""
    async with web_server(FakeScheduler(held=True), keys=KEYS, max_waiting=2) as server:
        alice = server.app[GUARD].open_owner_account("name alice")
        assert alice is not None
        first = asyncio.create_task(ask(server, ALICE, max_tokens=30))
        await until(lambda: server.engine.num_requests == 1)
        others = []
        for number in range(1, 3):
            others.append(asyncio.create_task(ask(server, ALICE, max_tokens=20)))
            await until(lambda expected=number: alice.num_waiting == expected)  # type: ignore[misc]
        status, _, retry = await ask(server, ALICE)
        assert (status, retry) == (429, "1")
        bob = asyncio.create_task(ask(server, BOB))
        await until(lambda: server.engine.num_requests == 2)
        async with server.http.get(server.url + "/metrics", headers=bearer(ALICE)) as response:
            assert 'toka:waiting_requests{owner="key alice"} 2.0' in await response.text()
        for running in (first, *others):
            while not running.done():
                server.scheduler.step()
                await asyncio.sleep(0)
            assert alice.num_requests <= 1
        assert [(await each)[0] for each in (first, *others, bob)] == [200] * 4
        assert (alice.num_requests, alice.num_tokens, alice.num_waiting, alice.num_refused) == (0, 0, 0, 1)


async def test_who_hangs_up_waits_no_more() -> None:
    async with web_server(FakeScheduler(held=True), max_requests=1, max_waiting=5) as server:
        total = server.app[SERVICE].accounts.total
        first = asyncio.create_task(ask(server, ""))
        await until(lambda: server.engine.num_requests == 1)
        second = asyncio.create_task(ask(server, ""))
        await until(lambda: total.num_waiting == 1)
        third = asyncio.create_task(ask(server, ""))
        await until(lambda: total.num_waiting == 2)
        second.cancel()
        await until(lambda: total.num_waiting == 1)
        while not third.done():
            server.scheduler.step()
            await asyncio.sleep(0)
        assert [(await each)[0] for each in (first, third)] == [200, 200]
        assert (total.num_waiting, total.num_requests) == (0, 0)


async def test_a_deadline_counts_from_before_the_wait() -> None:
    async with web_server(FakeScheduler(held=True), max_requests=1, max_waiting=5, request_timeout=0.4) as server:
        first = asyncio.create_task(ask(server, ""))
        await until(lambda: server.engine.num_requests == 1)
        second = asyncio.create_task(ask(server, "", max_tokens=100))
        await asyncio.sleep(0.1)  # by which the second's deadline comes before the third's
        third = asyncio.create_task(ask(server, ""))
        await until(lambda: server.app[SERVICE].accounts.total.num_waiting == 2)
        while not first.done():
            server.scheduler.step()
            await asyncio.sleep(0)
        done, _ = await asyncio.wait({second, third}, return_when=asyncio.FIRST_COMPLETED)
        assert done == {second}
        assert [(await each)[0] for each in (second, third)] == [504, 504]
        assert server.app[SERVICE].accounts.total.num_requests == 0


async def test_who_waits_when_the_engine_stops_is_told() -> None:
    async with web_server(FakeScheduler(held=True), max_requests=1, max_waiting=5) as server:
        asked = [asyncio.create_task(ask(server, "")) for _ in range(3)]
        await until(lambda: server.app[SERVICE].accounts.total.num_waiting == 2)
        server.engine.fail_all("gone")
        assert [(await each)[0] for each in asked] == [500, 503, 503]


async def test_tokens_in_total() -> None:
    async with web_server(FakeScheduler(held=True), max_held_tokens=30) as server:
        first = asyncio.create_task(ask(server, "", max_tokens=20))
        await until(lambda: server.engine.num_requests)
        status, answer, retry = await ask(server, "")
        assert (status, retry) == (429, "1")
        assert checked_error(answer)["message"].startswith("this server: 1 requests with 23 tokens")
        first.cancel()
        await until(lambda: not server.engine.num_requests)
        assert server.app[SERVICE].accounts.total.num_tokens == 0


async def test_lines_of_batches_leave_half_to_connections(tmp_path: Path) -> None:
    """And all of them end, but the one that asks for more than that."""
    body = {"prompt": [1, 2, 3], "max_tokens": 10}
    line = {"method": "POST", "url": "/v1/completions", "body": body}
    lines = [json.dumps({"custom_id": str(number), **line}) for number in range(20)]
    lines.append(json.dumps({"custom_id": "large", **line, "body": body | {"max_tokens": 40}}))
    held: list[int] = []  # tokens of batches as each line arrives

    def look(submit: Submit, sample: int) -> list[int]:
        held.append(account.num_tokens)
        return random_tokens(submit, sample)

    async with web_server(FakeScheduler(look), data_dir=str(tmp_path), max_held_tokens=60) as server:
        account = server.app[SERVICE].accounts.batches
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client:
            file = await client.files.create(file=("in", "\n".join(lines).encode()), purpose="batch")
            batch = await client.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
            )
            batch = await ended(client, batch)
        assert batch.request_counts is not None
        assert (batch.request_counts.completed, batch.request_counts.failed) == (20, 1)
        assert len(held) == 20
        assert all(0 < tokens <= 30 for tokens in held)
        assert (account.num_requests, account.num_tokens) == (0, 0)
