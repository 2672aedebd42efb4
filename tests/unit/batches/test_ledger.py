"""Lines on their way to the disk; with a store and its writer, see test_work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any, cast

from tests.drivers.until import SECONDS, turns
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
        await turns()
        return work()


class PartlyBrokenStore(FakeStore):
    def finish_lines(self, batch_id: str, lines: list[DoneLine]) -> tuple[str, int, str]:
        assert batch_id != "broken"
        return super().finish_lines(batch_id, lines)


def stop(batch_id: str, error: BaseException) -> None:
    raise AssertionError(batch_id) from error


async def test_what_it_says_of_the_disk_is_about_no_line() -> None:
    kept: list[Any] = []
    ledger = Ledger(cast(Store, FakeStore()), cast(Writer, FakeWriter()), kept.append, stop)
    token = request_id.set("batch_1-0")
    ledger.put("batch_1", DoneLine(line=0, end=1, failed=False, data=b"x"))
    request_id.reset(token)
    await ledger.flush()
    assert kept == [("batch_1", 1, "")]


async def test_a_flush_waits_for_nothing_that_comes_after_it() -> None:
    kept: list[Any] = []
    ledger = Ledger(cast(Store, FakeStore()), cast(Writer, FakeWriter()), kept.append, stop)

    async def go_on() -> None:
        for number in count():
            ledger.put("other", DoneLine(line=number, end=1, failed=False, data=b"x"))
            await asyncio.sleep(0)

    others = asyncio.create_task(go_on())
    await turns(10)
    ledger.put("batch_1", DoneLine(line=0, end=1, failed=True, data=b"x"))
    async with asyncio.timeout(SECONDS):
        await ledger.flush()
    assert ("batch_1", 1, "") in kept
    others.cancel()
    await ledger.flush()
    assert sum(num for _, num, _ in kept) == ledger.num_completed + ledger.num_failed


async def test_a_batch_whose_lines_cannot_be_kept_is_in_no_others_way() -> None:
    kept: list[Any] = []
    broken: list[tuple[str, str]] = []
    ledger = Ledger(
        cast(Store, PartlyBrokenStore()),
        cast(Writer, FakeWriter()),
        kept.append,
        lambda batch_id, error: broken.append((batch_id, type(error).__name__)),
    )
    for _ in range(2):
        for batch_id in ("broken", "good"):
            ledger.put(batch_id, DoneLine(line=0, end=1, failed=False, data=b"x"))
        await ledger.flush()
    assert kept == [("good", 1, "")] * 2
    assert broken == [("broken", "AssertionError")] * 2
