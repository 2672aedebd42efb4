"""Lines on their way to the disk; with a store and its writer, see test_work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from toka_async.batches.ledger import Ledger
from toka_async.batches.records import DoneLine
from toka_async.batches.store import Store
from toka_async.batches.writer import Writer
from toka_async.logs import request_id


class FakeStore:
    def finish_lines(self, batch_id: str, lines: list[DoneLine]) -> tuple[str, int, str]:
        return batch_id, len(lines), request_id.get()


class FakeWriter:
    async def run(self, work: Callable[[], Any]) -> Any:
        return work()


async def test_what_it_says_of_the_disk_is_about_no_line() -> None:
    kept: list[Any] = []
    ledger = Ledger(cast(Store, FakeStore()), cast(Writer, FakeWriter()), kept.append)
    token = request_id.set("batch_1-0")
    ledger.put("batch_1", DoneLine(line=0, end=1, failed=False, data=b"x"))
    request_id.reset(token)
    await ledger.flush()
    assert kept == [("batch_1", 1, "")]
