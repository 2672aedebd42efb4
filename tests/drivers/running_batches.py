"""Batches of a folder while a process lives, with answers that need no engine."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.drivers.until import SECONDS, until_async
from tests.fakes.answers import FakeAnswers
from toka_async.batches.clock import SettledClock
from toka_async.batches.disk import Disk
from toka_async.batches.records import Batch, BatchRecord, FileRecord
from toka_async.batches.store import Store
from toka_async.batches.work import Batches, InputFileLimits
from toka_async.batches.writer import Transactions, Writer
from toka_async.server.limits.window import EngineLoad

URL = "/v1/completions"


class Running:
    """Batches of a folder while a process lives. ahead: seconds that their clock is ahead."""

    def __init__(self, folder: Path, executor: ThreadPoolExecutor) -> None:
        self.disk = Disk()
        self.ahead, clock = 0.0, SettledClock()
        self.store = Store(folder, lambda: clock() + self.ahead, self.disk)
        self.answers = FakeAnswers()
        self.window = self.answers.accounts.window
        self.ended: asyncio.Queue[Batch] = asyncio.Queue()
        writer = Writer(Transactions(self.store.database.connection, self.store.after_commit, self.store.forget))
        self.batches = Batches(
            self.store, writer, self.answers, InputFileLimits(10_000, 1 << 16), executor, on_end=self.ended.put_nowait
        )

    async def create(self, lines: Iterable[bytes | dict[str, Any]], name: str = "b", **fields: Any) -> None:
        raw = [each if isinstance(each, bytes) else json.dumps(each).encode() for each in lines]
        upload = self.store.folder.uploads / "one"
        upload.write_bytes(b"\n".join(raw))
        file = FileRecord(id=f"file-{name}", filename="in", purpose="batch", bytes=1, created_at=1)
        await self.batches.writer.run(lambda: self.store.add_file(file, upload))
        given: dict[str, Any] = {"input_file_id": file.id, "endpoint": URL, "created_at": 1} | fields
        await self.batches.create(BatchRecord(id=name, output_id=f"{name}-out", error_id=f"{name}-err", **given))

    async def end(self) -> Batch:
        return await asyncio.wait_for(self.ended.get(), SECONDS)

    async def until(self, is_so: Callable[[Batch], bool], name: str = "b") -> None:
        async def find() -> bool:
            return is_so(await self.batch(name))

        await until_async(find)

    async def batch(self, name: str = "b") -> Batch:
        return await self.batches.writer.run(lambda: self.store.batch(name))

    def results(self, file_id: str) -> list[dict[str, Any]]:
        path = self.store.path(file_id)
        return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []

    def ids(self, file_id: str) -> Counter[str]:
        return Counter(line["custom_id"] for line in self.results(file_id))


@asynccontextmanager
async def running(folder: Path, rows: int = 8) -> AsyncIterator[Running]:
    with ThreadPoolExecutor(2) as executor:
        made = Running(folder, executor)
        made.answers.gate.set()
        if rows:
            made.window.report(EngineLoad(rows))
        made.batches.start()
        try:
            yield made
        finally:
            await made.batches.stop()


def line(number: int, **body: object) -> dict[str, Any]:
    return {"custom_id": f"c{number}", "method": "POST", "url": URL, "body": body}


def names(numbers: Iterable[int]) -> Counter[str]:
    return Counter(f"c{number}" for number in numbers)
