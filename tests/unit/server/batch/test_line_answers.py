from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from tests.drivers.until import until
from tests.drivers.web_server import WebServer, web_server
from tests.fakes.scheduler import READY, FakeScheduler
from toka_async.batches.disk import StorageError
from toka_async.batches.records import BatchRecord
from toka_async.server.batch import line_answers
from toka_async.server.batch.batch_service import read_load
from toka_async.server.batch.line_answers import MAX_TRIES, LineAnswers, PreparedLine
from toka_async.server.generate.service import Service
from toka_async.server.http.respond import SERVICE

RECORD = BatchRecord(id="b", endpoint="", input_file_id="i", output_id="o", error_id="e", created_at=1)


class Lines:
    """Lines of one owner on a server whose schedulers are stepped and lost by hand."""

    def __init__(self, server: WebServer) -> None:
        self.server = server
        service = self.service = server.app[SERVICE]
        self.accounts = service.accounts
        self.account = self.accounts.batches_of(self.accounts.open("alice"))
        self.answers = LineAnswers(service, lambda _owner: self.account)
        self.life = 0
        self.scheduler = server.scheduler
        server.engine.on_state.append(self.report)
        self.report()

    def report(self) -> None:
        self.accounts.window.report(read_load(self.server.engine))

    async def prepare(self, custom_id: str = "a", owner: str = "", **body: Any) -> Any:
        fields = {"prompt": [1, 2, 3], "max_tokens": 2} | body
        line = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": fields}
        return await self.answers.prepare(msgspec.structs.replace(RECORD, owner=owner), msgspec.json.encode(line))

    def lose(self) -> None:
        self.life += 1
        ready = msgspec.structs.replace(READY, life=self.life)
        self.scheduler = FakeScheduler(held=True, ready=ready)
        self.server.engine.lose(0, self.life, "it was killed", self.scheduler)

    def revive(self) -> None:
        self.scheduler.start(self.server.engine.on_messages)

    async def step_until_done(self, task: asyncio.Task[Any]) -> Any:
        async with asyncio.timeout(60):
            while not task.done():
                self.scheduler.step()
                await asyncio.sleep(0)
        return task.result()


@pytest.fixture
async def lines() -> AsyncIterator[Lines]:
    async with web_server(FakeScheduler(held=True)) as server:
        yield Lines(server)


async def test_a_line_is_asked_again_when_the_engine_is_back(lines: Lines) -> None:
    line = await lines.prepare()
    await line.enter()
    task = asyncio.create_task(line.answer())
    await until(lambda: lines.server.engine.num_requests == 1)
    lines.lose()
    await until(lambda: lines.account.num_waiting == 1)
    assert lines.accounts.window.in_flight == 0
    lines.revive()
    answered = await lines.step_until_done(task)
    assert (answered.custom_id, answered.status, answered.output_tokens) == ("a", 200, 2)
    assert lines.accounts.window.in_flight == 1
    line.leave()
    line.leave()
    assert lines.accounts.window.in_flight == lines.account.num_requests == 0


async def test_lines_may_ask_for_responses(lines: Lines) -> None:
    body = {"input": "hi", "max_output_tokens": 2}
    raw = {"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": body}
    line: Any = await lines.answers.prepare(RECORD, msgspec.json.encode(raw))
    await line.enter()
    answered = await lines.step_until_done(asyncio.create_task(line.answer()))
    answer = msgspec.json.decode(answered.body)
    assert (answered.status, answered.output_tokens) == (200, 2)
    assert (answer["object"], answer["status"], answer["usage"]["output_tokens"]) == ("response", "incomplete", 2)
    line.leave()


async def test_a_line_with_which_the_engine_stops_again_and_again_has_failed(lines: Lines) -> None:
    line = await lines.prepare()
    await line.enter()
    task = asyncio.create_task(line.answer())
    for _ in range(MAX_TRIES):
        await until(lambda: lines.server.engine.num_requests == 1)
        lines.lose()
        lines.revive()
    answered = await task
    assert (answered.status, answered.error.code) == (0, "engine_stopped")
    assert "it was killed" in answered.error.message


async def test_lines_wait_for_an_engine_that_is_not_there_yet() -> None:
    async with web_server(FakeScheduler(held=True, ready=None)) as server:
        lines = Lines(server)
        tasks = [asyncio.create_task(lines.prepare(str(number))) for number in range(3)]
        await until(lambda: len(lines.accounts.queue) == 3)
        server.engine.on_messages([READY])
        prepared = await asyncio.gather(*tasks)
        assert [line.custom_id for line in prepared] == ["0", "1", "2"]
        assert lines.account.num_requests == lines.account.num_waiting == 0


async def test_what_can_never_enter_is_the_line_s_answer(lines: Lines) -> None:
    too_long = await lines.prepare(max_tokens=10_000)
    assert too_long.status == 400
    await (first := await lines.prepare()).enter()
    lines.accounts.open("alice", 1, 40)
    large = await lines.prepare(max_tokens=30)
    entering = asyncio.create_task(large.enter())
    await until(lambda: lines.account.num_waiting == 1)
    lines.accounts.open("alice", 1, 20)  # while it waits
    await entering
    answered = await large.answer()
    assert (answered.status, b"the limit is 1 requests and 20 tokens" in answered.body) == (400, True)
    large.leave()
    first.leave()
    assert lines.account.num_requests == 0


async def test_large_lines_are_parsed_as_memory_allows(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner's second line waits while the first one is tokenized, another owner's does not."""
    monkeypatch.setattr(line_answers, "LARGE", 1 << 10)
    monkeypatch.setattr(line_answers, "count_parsed_bytes", lambda _raw: 300 << 20)
    tokenizing, gate = list[str](), asyncio.Event()
    encode = Service.encode

    async def hold(service: Service, prompts: list[str], *more: Any) -> Any:
        tokenizing.append(prompts[0][:2])
        await gate.wait()
        return await encode(service, prompts, *more)

    monkeypatch.setattr(Service, "encode", hold)
    names = ("a1", "a2", "b1")
    tasks = [
        asyncio.create_task(lines.prepare(name, owner=name[0], prompt=name + 200 * "x", user=2000 * "x"))
        for name in names
    ]
    await until(lambda: len(tokenizing) == 2)
    assert tokenizing == ["a1", "b1"]
    gate.set()
    assert [(await task).custom_id for task in tasks] == [*names]


async def test_an_error_of_this_program_is_the_line_s_answer(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    line = await lines.prepare()
    assert isinstance(line, PreparedLine)
    await line.enter()
    monkeypatch.setattr(type(lines.service), "submitted", None)
    answered = await line.answer()
    assert (answered.status, b"internal_error" in answered.body) == (500, True)


async def test_a_line_that_is_not_what_was_checked(lines: Lines) -> None:
    with pytest.raises(StorageError):
        await lines.answers.prepare(RECORD, b"{}")
    refused = await lines.answers.prepare(RECORD, b'{"custom_id": "a", "more": 1}')
    assert refused.custom_id == "a"  # type: ignore[union-attr]
