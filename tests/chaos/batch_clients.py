"""Clients of files and batches: they upload, create, cancel, poll, and look at every line of what comes of it.

What was acknowledged outlives every kill. What was asked for and not acknowledged is either there as a whole, or not.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp

from tests.chaos.questions import Question, Questions, whole_answer
from tests.chaos.service import Service
from tests.chaos.tally import REFUSED, Item, Tally

POLL = 0.1  # seconds
ANSWER = HANG = 60.0  # seconds until a call is answered
MOST_LINES = 80
CANCELLED, WRONG_LINE, WRONG_FILE, DELETED, BROKEN_UPLOAD = 0.25, 0.05, 0.05, 0.5, 0.2  # shares of batches; of lines
FINAL = ("completed", "cancelled", "failed", "expired")
CUT = {"cancelled": "batch_cancelled", "expired": "batch_expired"}


class BrokenError(Exception):
    """A call has no answer, because the front end was made to end."""


@dataclass(slots=True)
class Planned:
    """A batch: the question of each line, by custom id; None where the line is wrong. is_file: of a file that is."""

    tag: str
    lines: dict[str, Question | None]
    is_file: bool = True
    id: str | None = None
    seen: bool = False

    def data(self) -> bytes:
        bodies = (self._line(name, question) for name, question in self.lines.items())
        return b"".join(bodies) + (b"" if self.is_file else b"nonsense\n")

    def _line(self, name: str, question: Question | None) -> bytes:
        body = {"prompt": "x", "temperature": 99} if question is None else question.body
        line = {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}
        return json.dumps(line).encode() + b"\n"


class BatchClients:
    """All batches of the storm."""

    def __init__(self, service: Service, questions: Questions, tally: Tally, draw: random.Random) -> None:
        self._service = service
        self._questions = questions
        self._tally = tally
        self._draw = draw
        self._planned: dict[str, Planned] = {}

    async def run(self, stop: asyncio.Event) -> None:
        """One batch after the other. Those that break off are looked for at the end."""
        while not stop.is_set():
            await self._service.up.wait()
            planned = self._plan()
            async with aiohttp.ClientSession() as http:
                try:
                    await self._create(http, planned)
                    await self._follow(http, planned, stop)
                except BrokenError:
                    await asyncio.sleep(POLL)

    async def settle(self, timeout: float) -> None:
        """Every batch that the server knows ends, and every one that it acknowledged is known."""
        async with aiohttp.ClientSession() as http:
            known: dict[str, str] = {}
            after = ""
            while True:
                page = await self._call(http, "GET", f"/v1/batches?limit=100{after}")
                known |= {batch["metadata"]["tag"]: batch["id"] for batch in page["data"]}
                if not page["has_more"]:
                    break
                after = f"&after={page['last_id']}"
            for planned in self._planned.values():
                if planned.id is not None and known.get(planned.tag) != planned.id:
                    self._tally.fault(f"batch {planned.id} was acknowledged and is not there")
                if planned.tag in known and not planned.seen:
                    planned.id = known[planned.tag]
                    async with asyncio.timeout(timeout):
                        await self._follow(http, planned, asyncio.Event())

    def _plan(self) -> Planned:
        draw, tag = self._draw, f"{len(self._planned)}"
        count = draw.randrange(1, MOST_LINES)
        wrong = [draw.random() < WRONG_LINE for _ in range(count)]
        lines = {f"{tag}-{i}": None if wrong[i] else draw.choice(self._questions.answerable) for i in range(count)}
        planned = self._planned[tag] = Planned(tag, lines, is_file=draw.random() >= WRONG_FILE)
        return planned

    async def _create(self, http: aiohttp.ClientSession, planned: Planned) -> None:
        if self._draw.random() < BROKEN_UPLOAD:
            await self._break_off(http)
        form = aiohttp.FormData()
        form.add_field("purpose", "batch")
        form.add_field("file", planned.data(), filename="in.jsonl")
        file = await self._call(http, "POST", "/v1/files", data=form)
        body = {
            "input_file_id": file["id"],
            "endpoint": "/v1/completions",
            "completion_window": "24h",
            "metadata": {"tag": planned.tag},
        }
        planned.id = (await self._call(http, "POST", "/v1/batches", json=body))["id"]

    async def _break_off(self, http: aiohttp.ClientSession) -> None:
        """An upload whose sender leaves in the middle."""

        async def data() -> AsyncIterator[bytes]:
            yield b"x" * 300_000
            await asyncio.sleep(HANG)

        form = aiohttp.FormData()
        form.add_field("purpose", "batch")
        form.add_field("file", data(), filename="in.jsonl")
        with self._tally.item("upload") as item:
            try:
                async with asyncio.timeout(self._draw.uniform(0.05, 0.3)):
                    await http.post(f"{self._service.url}/v1/files", data=form)
            except (TimeoutError, aiohttp.ClientError, OSError):
                item.end("left")

    async def _follow(self, http: aiohttp.ClientSession, planned: Planned, stop: asyncio.Event) -> None:
        """Until it has ended; then looks at what came of it."""
        cancels = self._draw.random() < CANCELLED
        path, num_done = f"/v1/batches/{planned.id}", 0
        while True:
            batch = await self._call(http, "GET", path)
            counts = batch["request_counts"]
            done = counts["completed"] + counts["failed"]
            if done < num_done:
                self._tally.fault(f"{planned.id}: {num_done} lines had ended, now {done}")
            num_done = done
            if batch["status"] in FINAL:
                break
            if cancels and self._draw.random() < 0.3:
                await self._call(http, "POST", f"{path}/cancel", ended=(400, "batch_ended"))
                cancels = False
            await asyncio.sleep(POLL)
            if stop.is_set():
                return
        await self._check(http, planned, batch)
        if self._draw.random() < DELETED:
            await self._delete(http, batch)

    async def _check(self, http: aiohttp.ClientSession, planned: Planned, batch: dict[str, Any]) -> None:
        output = await self._lines(http, batch["output_file_id"])
        errors = await self._lines(http, batch["error_file_id"])
        if planned.seen:
            return
        planned.seen = True
        with self._tally.item("batch") as item:
            item.end(batch["status"])
        if (batch["status"] == "failed") == planned.is_file and batch["status"] != "cancelled":
            self._tally.fault(f"{planned.id} is {batch['status']}: {batch['errors']}")
        if batch["in_progress_at"] is not None:
            self._check_lines(planned, batch, output, errors)

    def _check_lines(self, planned: Planned, batch: dict[str, Any], output: list[Any], errors: list[Any]) -> None:
        where = f"{planned.id}, {batch['status']}"
        named = Counter(line["custom_id"] for line in [*output, *errors])
        for name, count in named.items():
            if name not in planned.lines or count > 1:
                self._tally.fault(f"{where}: line {name} is there {count} times")
        counts = {"total": len(planned.lines), "completed": len(output), "failed": len(errors)}
        if batch["request_counts"] != counts:
            self._tally.fault(f"{where}: counts {batch['request_counts']} instead of {counts}")
        answers = {line["custom_id"]: (True, line) for line in output}
        answers |= {line["custom_id"]: (False, line) for line in errors}
        for name, question in planned.lines.items():
            with self._tally.item("batch line") as item:
                if name not in answers:
                    item.wrong(f"{where}: line {name} is lost")
                else:
                    check_line(item, batch["status"], question, *answers[name])

    async def _lines(self, http: aiohttp.ClientSession, file_id: str | None) -> list[Any]:
        if file_id is None:
            return []
        data = await self._call(http, "GET", f"/v1/files/{file_id}/content", raw=True)
        return [json.loads(line) for line in data.splitlines()]

    async def _delete(self, http: aiohttp.ClientSession, batch: dict[str, Any]) -> None:
        """A deletion that broke off may have been done."""
        for name in ("input_file_id", "output_file_id", "error_file_id"):
            if batch[name] is not None:
                await self._call(http, "DELETE", f"/v1/files/{batch[name]}", ended=(404, ""))

    async def _call(
        self,
        http: aiohttp.ClientSession,
        method: str,
        path: str,
        *,
        raw: bool = False,
        ended: tuple[int, str] | None = None,
        **fields: Any,
    ) -> Any:
        """Raises BrokenError."""
        with self._tally.item("files and batches call") as item:
            ends, doomed = self._service.num_ends, self._service.is_doomed
            try:
                async with (
                    asyncio.timeout(ANSWER),
                    http.request(method, self._service.url + path, **fields) as response,
                ):
                    data = await response.read()
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                if not isinstance(error, TimeoutError) and (
                    doomed or self._service.is_doomed or self._service.num_ends != ends
                ):
                    item.end("broken with the front end")
                else:
                    item.wrong(f"{method} {path}: {error!r}")
                raise BrokenError from None
            if response.status == 503:
                item.end(REFUSED)
                raise BrokenError
            if response.status == 200 or (ended and response.status == ended[0] and ended[1].encode() in data):
                item.end("answered")
                return data if raw else json.loads(data)
            item.wrong(f"{method} {path}: {response.status} {data[:500]!r}")
            raise BrokenError


def check_line(item: Item, status: str, question: Question | None, is_output: bool, line: dict[str, Any]) -> None:
    """A line's end: its answer, or an error that it may have."""
    error, response = line["error"], line["response"]
    if error is not None and error["code"] == CUT.get(status):
        item.end("cut short")
    elif question is None:
        right = not is_output and response is not None and response["status_code"] == 400
        item.end("refused") if right else item.wrong(f"{line}")
    elif error is not None and error["code"] == "engine_stopped" and not is_output:
        item.end("engine stopped")
    elif not is_output or response["status_code"] != 200:
        item.wrong(f"{line}")
    elif fault := question.fault(whole_answer(response["body"])):
        item.wrong(fault)
    else:
        item.end("right")
