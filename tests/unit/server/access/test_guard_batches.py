from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
from openai.types import BatchRequestCounts

from tests.drivers.until import until, until_async
from tests.drivers.web_server import WebServer, web_server
from tests.fakes.scheduler import FakeScheduler, random_tokens
from tests.processes.keyed import ALICE, BOB, KEYS, ask, batch_of, bearer, ended
from toka_async.batches.records import Batch as StoredBatch
from toka_async.messages import Submit
from toka_async.server.access.keys import Key, Keys, digest_key
from toka_async.server.http.files import BATCHES
from toka_async.server.http.respond import SERVICE


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[WebServer]:
    async with web_server(keys=KEYS, data_dir=str(tmp_path)) as running:
        yield running


async def test_a_batch_counts_in_its_key_and_waits_at_its_limits(tmp_path: Path) -> None:
    """All lines end; no more than the key's 2 requests and 40 tokens run."""
    counts: list[tuple[int, int]] = []  # requests and tokens that run as each line arrives

    def look(submit: Submit, sample: int) -> list[int]:
        counts.append((alice.num_requests, alice.num_tokens))
        return random_tokens(submit, sample)

    async with (
        web_server(FakeScheduler(look), keys=KEYS, data_dir=str(tmp_path)) as server,
        openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=ALICE, max_retries=0) as client,
    ):
        alice = server.app[SERVICE].accounts.open("key alice", 2, 40)
        batch = await ended(client, await batch_of(client, 200))
        assert batch.request_counts == BatchRequestCounts(completed=200, failed=0, total=200)
        assert len(counts) == 200
        assert all(0 < requests <= 2 and 0 < tokens <= 40 for requests, tokens in counts)
        salts = {message.salt for message in server.scheduler.submits}
        assert (await ask(server, ALICE))[0] == 200
        salts |= {message.salt for message in server.scheduler.submits}
        assert len(salts) == 1, "a key's batches find what its requests have cached"
        assert 0 not in salts
        assert (alice.num_requests, alice.num_tokens, alice.num_refused) == (0, 0, 0)


async def test_a_batch_is_not_in_line_behind_another_key_s(tmp_path: Path) -> None:
    async with (
        web_server(FakeScheduler(held=True), keys=KEYS, data_dir=str(tmp_path)) as server,
        openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=ALICE, max_retries=0) as client,
        openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=BOB, max_retries=0) as other,
    ):
        accounts = server.app[SERVICE].accounts
        await batch_of(client, 50)
        await until(lambda: getattr(accounts.by_name.get("batches of key alice"), "num_waiting", 0) > 0)
        await batch_of(other, 20)
        await until(lambda: getattr(accounts.by_name.get("key bob"), "num_requests", 0) == 20)
        assert accounts.by_name["key alice"].num_requests <= 2


async def test_a_key_s_request_goes_before_its_batch(tmp_path: Path) -> None:
    async with (
        web_server(FakeScheduler(held=True), keys=KEYS, data_dir=str(tmp_path), max_waiting=5) as server,
        openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=ALICE, max_retries=0) as client,
    ):
        await batch_of(client, 50)
        accounts = server.app[SERVICE].accounts
        await until(lambda: "batches of key alice" in accounts.by_name)
        lines = accounts.by_name["batches of key alice"]
        await until(lambda: lines.num_waiting > 0)
        asked = asyncio.create_task(ask(server, ALICE))
        await until(lambda: accounts.by_name["key alice"].num_waiting == 1)
        while not asked.done():
            server.scheduler.step()
            await asyncio.sleep(0)
        assert (await asked)[0] == 200
        assert lines.num_waiting > 0


async def test_files_and_batches_are_their_key_s(server: WebServer) -> None:
    async with (
        openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=ALICE, max_retries=0) as client,
        openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=BOB, max_retries=0) as other,
    ):
        batch = await ended(client, await batch_of(client, 3))
        assert batch.output_file_id is not None
        for file_id in (batch.input_file_id, batch.output_file_id):
            assert (await client.files.retrieve(file_id)).id == file_id
            for attempt in (other.files.retrieve, other.files.content, other.files.delete):
                with pytest.raises(openai.NotFoundError):
                    await attempt(file_id)
            with pytest.raises(openai.NotFoundError):
                await other.files.list(after=file_id)
        for action in (other.batches.retrieve, other.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                await action(batch.id)
        with pytest.raises(openai.NotFoundError):
            await other.batches.list(after=batch.id)
        with pytest.raises(openai.BadRequestError, match="there is no file"):
            await other.batches.create(
                input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h"
            )
        theirs = await batch_of(other, 1)
        for lister, mine in ((client, batch), (other, theirs)):
            assert [each.id for each in (await lister.batches.list()).data] == [mine.id]
            files = {each.id for each in (await lister.files.list()).data}
            assert mine.input_file_id in files
        assert len((await client.files.list()).data) == 2
        assert (await client.files.delete(batch.output_file_id)).deleted


async def test_after_a_restart_keys_may_be_gone(tmp_path: Path) -> None:
    """A batch of a key that is gone runs, in the server's limits; its name brings its files back."""
    data_dir = str(tmp_path)
    held = FakeScheduler(held=True)
    async with (
        web_server(held, keys=KEYS, data_dir=data_dir) as server,
        openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=ALICE, max_retries=0) as client,
    ):
        batch = await batch_of(client, 5)
        await until(lambda: server.engine.num_requests == 2)
    async with web_server(keys=Keys((Key(digest_key(BOB), "bob"),)), data_dir=data_dir) as server:
        service = server.app[BATCHES]
        assert service is not None

        async def completed() -> StoredBatch | None:
            entry = await service.writer.run(lambda: service.store.batch(batch.id))
            return entry if entry.record.status == "completed" else None

        assert (await until_async(completed)).progress.completed == 5
        assert "key alice" not in server.app[SERVICE].accounts.by_name
        async with server.http.get(f"{server.url}/v1/batches/{batch.id}", headers=bearer(BOB)) as response:
            assert response.status == 404
    renewed = "sk-alice-another"
    async with (
        web_server(keys=Keys((Key(digest_key(renewed), "alice"),)), data_dir=data_dir) as server,
        openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=renewed, max_retries=0) as client,
    ):
        assert (await client.batches.retrieve(batch.id)).status == "completed"
    async with web_server(data_dir=data_dir) as server:  # without keys, all is everybody's
        assert (await server.get(f"/v1/batches/{batch.id}"))[0] == 200
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client:
            shared = await ended(client, await batch_of(client, 1))
    async with (
        web_server(keys=KEYS, data_dir=data_dir) as server,
        openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=BOB, max_retries=0) as client,
    ):
        assert [each.id for each in (await client.batches.list()).data] == [shared.id]
