"""Batches over HTTP, driven by the `openai` package where it can: what the lines become, and what can be wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from openai.types import Batch

from tests.drivers.until import until, until_async
from tests.drivers.web_server import WebServer, checked_error, web_server
from tests.fakes.scheduler import FakeScheduler
from toka_async.batches.disk import StorageError
from toka_async.openai.parse import parse_request
from toka_async.server.batch import line_answers
from toka_async.server.batch.line_answers import PRIORITY
from toka_async.server.http.files import BATCHES

CHAT: Literal["/v1/chat/completions"] = "/v1/chat/completions"
TEXT: Literal["/v1/completions"] = "/v1/completions"

Endpoint = Literal["/v1/chat/completions", "/v1/completions"]


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[WebServer]:
    async with web_server(data_dir=str(tmp_path)) as running:
        yield running


def line(number: int, url: str = TEXT, method: str = "POST", **body: object) -> dict[str, object]:
    asks: dict[str, object] = {"messages": [{"role": "user", "content": "hi"}]} if url == CHAT else {"prompt": "hi"}
    return {"custom_id": f"c{number}", "method": method, "url": url, "body": {"max_tokens": 4} | asks | body}


async def created(
    client: openai.AsyncOpenAI, lines: Iterable[object], endpoint: Endpoint = TEXT, **fields: Any
) -> Batch:
    data = "\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines).encode()
    file = await client.files.create(file=("in.jsonl", data), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint=endpoint, **({"completion_window": "24h"} | fields)
    )


async def ended(client: openai.AsyncOpenAI, batch: Batch) -> Batch:
    async def final() -> Batch | None:
        found = await client.batches.retrieve(batch.id)
        return None if found.status in ("validating", "in_progress", "finalizing", "cancelling") else found

    return await until_async(final)


async def results(client: openai.AsyncOpenAI, file_id: str | None) -> dict[str, Any]:
    """Lines by custom_id, each there once."""
    if file_id is None:
        return {}
    lines = (await client.files.content(file_id)).content.splitlines()  # text may have other ends of lines in it
    found = {each["custom_id"]: each for each in map(json.loads, lines)}
    assert len(found) == len(lines)
    return found


async def test_a_batch_of_completions(client: openai.AsyncOpenAI, server: WebServer) -> None:
    lines = [line(number, n=2, priority=3) for number in range(20)]
    batch = await created(client, lines, metadata={"for": "a test"})
    assert (batch.status, batch.endpoint, batch.completion_window) == ("validating", TEXT, "24h")
    assert batch.expires_at == batch.created_at + 86400
    batch = await ended(client, batch)
    assert batch.status == "completed"
    assert batch.metadata == {"for": "a test"}
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 20, "completed": 20, "failed": 0}
    assert batch.created_at <= (batch.in_progress_at or 0) <= (batch.finalizing_at or 0) <= (batch.completed_at or 0)
    assert (batch.errors, batch.error_file_id) == (None, None)
    assert batch.usage is not None
    assert batch.usage.output_tokens == 20 * 8
    found = await results(client, batch.output_file_id)
    assert found.keys() == {f"c{number}" for number in range(20)}
    answer = found["c7"]
    assert answer["error"] is None
    assert answer["response"]["status_code"] == 200
    assert answer["response"]["body"]["object"] == "text_completion"
    assert [choice["index"] for choice in answer["response"]["body"]["choices"]] == [0, 1]
    submits = server.scheduler.submits
    assert {submit.priority for submit in submits} == {PRIORITY + 3}
    output = await client.files.retrieve(batch.output_file_id or "")
    assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")


async def test_a_batch_of_chats(client: openai.AsyncOpenAI) -> None:
    batch = await ended(client, await created(client, [line(1, CHAT, seed=1), line(2, CHAT, seed=1)], CHAT))
    found = await results(client, batch.output_file_id)
    bodies = [found[name]["response"]["body"] for name in ("c1", "c2")]
    assert bodies[0]["choices"] == bodies[1]["choices"]
    assert bodies[0]["object"] == "chat.completion"


async def test_lines_that_are_wrong_go_to_the_error_file(client: openai.AsyncOpenAI) -> None:
    wrong: list[tuple[dict[str, object], int, str | None]] = [
        (line(1, CHAT), 400, "url"),
        (line(2, method="GET"), 400, "method"),
        (line(3, model="other"), 404, "model"),
        (line(4, temperature=9), 400, "temperature"),
        (line(5, color="red"), 400, "color"),
        (line(6, stream=True), 400, "stream"),
        (line(7, prompt=""), 400, "prompt"),
        (line(8, max_tokens=5000), 400, "max_tokens"),
        ({"custom_id": "c9"}, 400, None),
        (line(10) | {"body": [1]}, 400, None),
        (line(11) | {"more": 1}, 400, None),
    ]
    batch = await ended(client, await created(client, [line(0), *(each for each, _, _ in wrong)]))
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 12, "completed": 1, "failed": 11}
    assert (await results(client, batch.output_file_id)).keys() == {"c0"}
    found = await results(client, batch.error_file_id)
    for each, status, param in wrong:
        result = found[str(each["custom_id"])]
        assert result["response"]["status_code"] == status
        assert checked_error(result["response"]["body"])["param"] == param, each


async def test_requests_that_the_engine_refuses(client: openai.AsyncOpenAI, server: WebServer) -> None:
    server.scheduler.fail_with = "no room for this"
    batch = await ended(client, await created(client, [line(0)]))
    found = await results(client, batch.error_file_id)
    assert found["c0"]["response"]["body"]["error"]["message"] == "no room for this"


async def test_a_file_that_is_no_batch(client: openai.AsyncOpenAI) -> None:
    batch = await ended(client, await created(client, [line(0), "{", line(0)]))
    assert batch.status == "failed"
    assert batch.failed_at is not None
    assert batch.errors is not None
    assert [(each.code, each.line) for each in batch.errors.data or []] == [("invalid_json_line", 2)]
    assert batch.output_file_id is None


async def test_cancelling(client: openai.AsyncOpenAI, server: WebServer) -> None:
    server.scheduler.held = True
    batch = await created(client, [line(number) for number in range(10)])
    await until(lambda: server.engine.num_requests)
    assert (await client.batches.cancel(batch.id)).status == "cancelling"
    batch = await ended(client, batch)
    assert batch.status == "cancelled"
    assert batch.cancelling_at is not None
    assert server.engine.num_requests == 0
    found = await results(client, batch.error_file_id)
    assert len(found) == 10
    assert found["c3"]["response"] is None
    assert found["c3"]["error"]["code"] == "batch_cancelled"
    assert (await client.batches.cancel(batch.id)).status == "cancelled"


async def test_what_has_ended_cannot_be_cancelled(client: openai.AsyncOpenAI) -> None:
    batch = await ended(client, await created(client, [line(0)]))
    with pytest.raises(openai.BadRequestError, match="completed cannot be cancelled"):
        await client.batches.cancel(batch.id)
    with pytest.raises(openai.NotFoundError):
        await client.batches.cancel("batch_nope")


async def test_a_batch_that_has_ended_can_be_deleted(client: openai.AsyncOpenAI, server: WebServer) -> None:
    """Its files stay. One that has not ended is not forgotten."""
    server.scheduler.held = True
    batch = await created(client, [line(0)])
    url = f"{server.url}/v1/batches/{batch.id}"
    async with server.http.delete(url) as response:
        assert response.status == 409
        assert checked_error(await response.json())["code"] == "batch_not_ended"
    server.scheduler.held = False
    server.scheduler.step()
    batch = await ended(client, batch)
    async with server.http.delete(url) as response:
        assert await response.json() == {"id": batch.id, "object": "batch", "deleted": True}
    for method in ("GET", "DELETE"):
        async with server.http.request(method, url) as response:
            assert response.status == 404
            checked_error(await response.json())
    assert not (await client.batches.list()).data
    assert len(await results(client, batch.output_file_id)) == 1


async def test_open_batches_are_limited(tmp_path: Path) -> None:
    async with (
        web_server(FakeScheduler(held=True), data_dir=str(tmp_path), key_max_open_batches=1) as server,
        openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        first = await created(client, [line(0)])
        with pytest.raises(openai.RateLimitError, match=r"batches\.key_max_open_batches") as caught:
            await client.batches.create(input_file_id=first.input_file_id, endpoint=TEXT, completion_window="24h")
        assert caught.value.code == "insufficient_quota"
        await client.batches.cancel(first.id)
        await ended(client, first)
        await client.batches.create(input_file_id=first.input_file_id, endpoint=TEXT, completion_window="24h")


async def test_a_line_that_cannot_even_be_explained_is_answered(client: openai.AsyncOpenAI) -> None:
    """Nested so deeply that looking for what is wrong with it must not recurse."""
    nested = "[" * 600 + "]" * 600
    wrong = f'{{"custom_id": "bad", "method": "POST", "url": "{TEXT}", "body": {{"b": {nested}, "a": 1e999}}}}'
    batch = await ended(client, await created(client, [line(0), wrong, line(1)]))
    assert batch.status == "completed"
    found = await results(client, batch.error_file_id)
    assert found.keys() == {"bad"}
    assert found["bad"]["response"]["status_code"] == 400


async def test_whatever_a_line_raises_is_its_answer(
    client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(raw: bytes, kind: Any) -> Any:
        if b"break" in raw:
            raise RecursionError
        return parse_request(raw, kind)

    monkeypatch.setattr(line_answers, "parse_request", broken)
    batch = await ended(client, await created(client, [line(0), line(1, user="break")]))
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 2, "completed": 1, "failed": 1}
    found = await results(client, batch.error_file_id)
    assert found["c1"]["response"]["status_code"] == 500
    checked_error(found["c1"]["response"]["body"])


async def test_pages(client: openai.AsyncOpenAI) -> None:
    ids = [(await ended(client, await created(client, [line(0)]))).id for _ in range(5)]
    page = await client.batches.list(limit=2)
    assert [batch.id for batch in page.data] == ids[:2:-1]
    assert [batch.id async for batch in client.batches.list(limit=2)] == ids[::-1]
    files = [file async for file in client.files.list(limit=3, purpose="batch")]
    assert len(files) == 5
    assert len([file async for file in client.files.list(limit=3, order="asc")]) == 10


async def test_the_input_of_a_batch_stays_until_it_ends(client: openai.AsyncOpenAI, server: WebServer) -> None:
    server.scheduler.held = True
    batch = await created(client, [line(0)])
    with pytest.raises(openai.ConflictError, match=batch.id):
        await client.files.delete(batch.input_file_id)
    server.scheduler.held = False
    server.scheduler.step()
    await ended(client, batch)
    assert (await client.files.delete(batch.input_file_id)).deleted


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_file_id": "file-nope"}, "input_file_id"),
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"completion_window": "900d"}, "completion_window"),
        ({"metadata": {str(key): "" for key in range(17)}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"metadata": {"a": 1}}, "metadata[...]"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
        ({"color": "red"}, "color"),
        ({"input_file_id": 5}, "input_file_id"),
    ],
)
async def test_wrong_batches(server: WebServer, fields: dict[str, object], param: str) -> None:
    body = {"input_file_id": "file-nope", "endpoint": TEXT, "completion_window": "24h"} | fields
    assert (await server.error("/v1/batches", body))["param"] == param.removesuffix("[...]")


async def test_an_output_file_is_no_input(client: openai.AsyncOpenAI) -> None:
    batch = await ended(
        client, await created(client, [line(0)], output_expires_after={"anchor": "created_at", "seconds": 7200})
    )
    output = await client.files.retrieve(batch.output_file_id or "")
    assert output.expires_at == output.created_at + 7200
    with pytest.raises(openai.BadRequestError, match="batch_output"):
        await client.batches.create(input_file_id=output.id, endpoint=TEXT, completion_window="24h")


async def test_a_server_that_ends_keeps_what_is_done(tmp_path: Path) -> None:
    """And a later one goes on, whatever ran is asked again."""
    scheduler = FakeScheduler(held=True)
    async with (
        web_server(scheduler, data_dir=str(tmp_path)) as server,
        openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as client,
    ):
        batch = await created(client, [line(number, max_tokens=1 + number % 3) for number in range(30)])
        await until(lambda: server.engine.num_requests >= 30)
        scheduler.step()

        async def has_results() -> bool:
            counts = (await client.batches.retrieve(batch.id)).request_counts
            return counts is not None and counts.completed == 10

        await until_async(has_results)
        server.engine.begin_drain()
        await asyncio.wait_for(server.engine.wait_idle(), 60)
    async with (
        web_server(data_dir=str(tmp_path)) as server,
        openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as client,
    ):
        batch = await ended(client, batch)
        assert len(await results(client, batch.output_file_id)) == 30
        assert len(server.scheduler.submits) == 20


async def test_requests_that_find_no_place_wait_for_one(tmp_path: Path) -> None:
    """Others hold all that the server may hold; the batch's lines are not failed for it."""
    scheduler = FakeScheduler(held=True)
    async with (
        web_server(scheduler, data_dir=str(tmp_path), max_requests=4) as server,
        openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as client,
    ):
        other = asyncio.create_task(server.ok(TEXT, {"prompt": ["a", "b", "c"], "max_tokens": 3}))
        await until(lambda: server.engine.num_requests >= 3)
        batch = await created(client, [line(number) for number in range(9)])
        await until(lambda: server.engine.num_requests >= 4)
        scheduler.held = False
        scheduler.step()
        await other
        batch = await ended(client, batch)
        assert batch.request_counts is not None
        assert batch.request_counts.completed == 9


async def test_the_object_says_that_the_disk_is_full(client: openai.AsyncOpenAI, server: WebServer) -> None:
    server.scheduler.held = True
    service = server.app[BATCHES]
    assert service is not None
    batch = await created(client, [line(0)])
    await until(lambda: server.engine.num_requests)
    service.batches.ledger.trouble = StorageError("no space left", full=True)
    batch = await client.batches.retrieve(batch.id)
    assert batch.errors is not None
    assert [each.code for each in batch.errors.data or []] == ["disk_full"]
    service.batches.ledger.trouble = None


async def test_metrics(client: openai.AsyncOpenAI, server: WebServer) -> None:
    await ended(client, await created(client, [line(0), line(1, color="red")]))
    async with server.http.get(server.url + "/metrics") as response:
        text = await response.text()
    assert 'toka:batch_lines_total{result="completed"} 1.0' in text
    assert 'toka:batch_lines_total{result="failed"} 1.0' in text
    assert "toka:batches_paused 0.0" in text
