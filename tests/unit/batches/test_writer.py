from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.drivers.until import until
from toka_async.batches.records import FileRecord
from toka_async.batches.store import NotFoundError, Store
from toka_async.batches.writer import Transactions, Writer

FILE = FileRecord(id="file-1", filename="in", purpose="batch", bytes=1, created_at=1)


def opened(folder: Path) -> Store:
    return Store(folder, lambda: 1000)


def put(store: Store, record: FileRecord = FILE) -> None:
    upload = store.folder.uploads / "one"
    upload.write_bytes(b"x")
    store.add_file(record, upload)


async def writing(store: Store) -> Writer:
    return Writer(Transactions(store.database.connection, store.after_commit, store.forget))


async def test_what_comes_together_is_one_transaction(tmp_path: Path) -> None:
    store = opened(tmp_path)
    statements: list[str] = []
    store.database.connection.set_trace_callback(statements.append)
    writer, gate = await writing(store), threading.Event()
    first = asyncio.create_task(writer.run(gate.wait))
    await until(lambda: "SAVEPOINT job" in statements)
    others = [asyncio.create_task(writer.run(lambda: len(statements))) for _ in range(20)]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(first, *others)
    assert statements.count("COMMIT") == 2
    await writer.close()
    store.close()


def boom() -> None:
    raise NotFoundError("boom")


async def test_a_job_that_fails_takes_no_other_along(tmp_path: Path) -> None:
    store = opened(tmp_path)
    writer = await writing(store)

    def half() -> None:
        put(store, FileRecord(id="file-2", filename="", purpose="batch", bytes=1, created_at=1))
        boom()

    works: list[Callable[[], None]] = [lambda: put(store), half, boom]
    done = await asyncio.gather(*(writer.run(work) for work in works), return_exceptions=True)
    assert [type(each) for each in done] == [type(None), NotFoundError, NotFoundError]
    assert (await writer.run(lambda: store.file("file-1"))).id == "file-1"
    with pytest.raises(NotFoundError):
        await writer.run(lambda: store.file("file-2"))
    await writer.close()
    store.close()


async def test_what_is_given_before_the_close_is_done(tmp_path: Path) -> None:
    store = opened(tmp_path)
    writer = await writing(store)
    tasks = [asyncio.create_task(writer.run(lambda: 5)) for _ in range(5)]
    await asyncio.sleep(0)
    await writer.close()
    assert await asyncio.gather(*tasks) == [5] * 5
    store.close()
