"""A wall clock that jumps while the server runs: deadlines stay as they were, expiry follows a jump that lasts."""

from __future__ import annotations

import ast
import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch

from tests.drivers.until import until, until_async
from tests.drivers.web_server import WebServer, web_server
from tests.fakes.scheduler import FakeScheduler
from toka_async.batches import clock as settled
from toka_async.batches import work

DAY = 86400.0
PACKAGE = Path(__file__).parents[4] / "toka_async"
WALL = {  # what expires by the calendar, and what people are shown
    "batches/clock.py",
    "procs/job.py",
    "server/generate/answers.py",
    "server/responses/answer.py",
    "server/generate/service.py",
    "server/sglang/info.py",
    "text/chat.py",
}


class Clock:
    """The wall's, with an offset."""

    def __init__(self) -> None:
        self.offset = 0.0
        self.num_asked = 0
        self._real = time.time

    def __call__(self) -> float:
        self.num_asked += 1
        return self._real() + self.offset


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("time.time", made)
    monkeypatch.setattr(work, "LONGEST_SLEEP", 0.02)
    return made


@pytest.fixture
async def server(clock: Clock, tmp_path: Path) -> AsyncIterator[WebServer]:
    assert time.time is clock
    config: dict[str, Any] = {"data_dir": str(tmp_path), "request_timeout": 20.0, "client_timeout": 5.0}
    async with web_server(FakeScheduler(held=True), **config) as running:
        yield running


async def created(client: openai.AsyncOpenAI) -> Batch:
    body = {"prompt": [1, 2, 3], "max_tokens": 4}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    file = await client.files.create(
        file=("in", json.dumps(line).encode()), purpose="batch", expires_after={"anchor": "created_at", "seconds": 7200}
    )
    return await client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")


async def ended(client: openai.AsyncOpenAI, server: WebServer, batch: Batch, *, steps: bool) -> Batch:
    async def final() -> Batch | None:
        if steps:
            server.scheduler.step()
        found = await client.batches.retrieve(batch.id)
        return found if found.status in ("completed", "expired") else None

    return await until_async(final)


@pytest.mark.parametrize("jump", [2 * DAY, -2 * DAY])
async def test_what_a_jump_changes(
    clock: Clock, server: WebServer, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client:
        batch = await created(client)
        asked = asyncio.create_task(server.ok("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 4}))
        await until(lambda: server.engine.num_requests == 2)
        clock.offset += jump
        clock.num_asked = 0
        await until(lambda: clock.num_asked >= 5)
        assert (await client.batches.retrieve(batch.id)).status == "in_progress"
        assert (await client.files.retrieve(batch.input_file_id)).id == batch.input_file_id
        if jump > 0:
            monkeypatch.setattr(settled, "PATIENCE", 0.0)  # it has lasted
            batch = await ended(client, server, batch, steps=False)
            assert (batch.status, batch.error_file_id is None) == ("expired", False)
            with pytest.raises(openai.NotFoundError):
                await client.files.retrieve(batch.input_file_id)
        else:
            batch = await ended(client, server, batch, steps=True)
            assert (batch.status, batch.error_file_id) == ("completed", None)
        assert not asked.done() or jump < 0  # no deadline has passed
        while not asked.done():
            server.scheduler.step()
            await asyncio.sleep(0)
        assert (await asked)["usage"]["completion_tokens"] == 4
        assert (await server.get("/health"))[0] == 200


def test_nothing_else_reads_the_wall_clock() -> None:
    """Deadlines, heartbeats, grace times, restarts and rates are by the monotonic clock."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("time.time", "datetime.now", "time.time_ns"):
                found.add(path.relative_to(PACKAGE).as_posix())
            if isinstance(node, ast.ImportFrom) and node.module == "time":
                assert not {"time", "time_ns"} & {name.name for name in node.names}, path
    assert {path for path in found if not path.startswith("bench/")} == WALL
