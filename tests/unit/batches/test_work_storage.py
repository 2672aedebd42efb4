from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tests.drivers.running_batches import Running, line, names, running
from tests.drivers.until import until
from toka_async.batches import ledger, work
from toka_async.batches.disk import StorageError
from toka_async.batches.records import BatchRecord
from toka_async.batches.reserve import SIZE


@pytest.mark.parametrize("damage", ["gone", "shorter"])
async def test_an_input_file_that_somebody_damages(tmp_path: Path, damage: str) -> None:
    async with running(tmp_path, rows=0) as it:
        await it.create([line(number) for number in range(2000)])
        await it.until(lambda batch: batch.record.status != "validating")
    path = tmp_path / "files" / "file-b"
    path.unlink() if damage == "gone" else path.write_bytes(path.read_bytes()[:20000])
    async with running(tmp_path) as it:
        batch = await it.end()
        assert batch.record.status == "failed"
        assert batch.record.faults[0].code == "input_file_unreadable"
        assert sum(it.ids("b-out").values()) == batch.progress.completed


@pytest.mark.parametrize("restart", [False, True])
async def test_a_damaged_output_file_ends_its_batch_alone(tmp_path: Path, restart: bool) -> None:
    async with running(tmp_path) as it:
        for name in ("b", "other"):
            await it.create([line(number, seconds=0.02) for number in range(800)], name)
        for name in ("b", "other"):
            await it.until(lambda batch: batch.progress.completed >= 8, name)
        if not restart:
            it.store.path("b-out").unlink()
            await end_damaged(it)
            assert (await it.end()).record.status == "completed"
            assert it.ids("other-out") == names(range(800))
    if restart:
        (tmp_path / "files" / "b-out").write_bytes(b"")
    async with running(tmp_path) as it:
        if restart:
            await end_damaged(it)
            assert (await it.end()).record.status == "completed"
        assert it.ids("other-out") == names(range(800))
        assert not it.store.path("b-out").exists()
        assert it.ended.empty()


async def end_damaged(it: Running) -> None:
    batch = await it.end()
    assert (batch.record.id, batch.record.status) == ("b", "failed")
    assert [fault.code for fault in batch.record.faults] == ["output_file_damaged"]
    assert batch.progress.completed < 800  # nothing more of it was asked
    assert it.batches.ledger.trouble is None


async def test_a_batch_whose_file_is_damaged_while_it_is_cut_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "WRITE_LINES", 10)
    async with running(tmp_path) as it:
        await it.create([line(number, seconds=0.0 if number < 5 else 60.0) for number in range(100)])
        await it.until(lambda batch: batch.progress.completed == 5)
        it.store.path("b-out").unlink()
        await it.batches.cancel("b")
        batch = await it.end()
        assert (batch.record.status, batch.record.outcome) == ("failed", "cancelled")
        assert (batch.progress.completed, batch.progress.failed) == (5, 0)
        assert it.batches.ledger.trouble is None


async def test_a_folder_that_is_away_pauses_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "FIRST_WAIT", 0.05)
    async with running(tmp_path) as it:
        await it.create([line(number, seconds=0.01) for number in range(200)])
        await it.until(lambda batch: batch.progress.completed > 0)
        (tmp_path / "files").rename(tmp_path / "away")
        trouble = await until(lambda: it.batches.ledger.trouble)
        assert not trouble.full
        assert (await it.batch()).record.status == "in_progress"
        (tmp_path / "away").rename(tmp_path / "files")
        assert (await it.end()).record.status == "completed"
        assert it.ids("b-out") == names(range(200))


async def test_a_full_disk_pauses_batches_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(ledger, "MAX_BYTES", 2000)  # few lines are asked while a slow machine finds out
    tries: list[str] = []

    def full(step: str) -> None:
        tries.append(step)
        raise OSError(errno.ENOSPC, "no space left on device")

    async with running(tmp_path) as it:
        it.answers.gate.clear()
        await it.create([line(number) for number in range(500)])
        await it.until(lambda batch: batch.record.status == "in_progress")
        it.disk.before = full
        it.answers.gate.set()
        trouble = await until(lambda: it.batches.ledger.trouble)
        assert trouble.full
        await until(lambda: len(tries) >= 3)
        assert it.answers.asked.total() < 500  # it does not go on
        assert (await it.batch()).progress.completed == 0  # and answers meanwhile
        it.disk.before = lambda _step: None
        batch = await it.end()
        assert not it.batches.ledger.trouble
        assert batch.progress.completed == 500
        assert it.ids("b-out") == names(range(500))
        assert it.answers.asked == names(range(500))


@pytest.mark.parametrize("checked", [False, True])
async def test_a_batch_can_be_cancelled_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checked: bool
) -> None:
    async with running(tmp_path, rows=0) as it:
        await it.create([line(1)])
        await it.until(lambda batch: not checked or batch.record.status != "validating")
        put, reserve = it.store.database.put_record, tmp_path / "reserve"

        def put_in_reserve(record: BatchRecord) -> None:
            if record.status == "cancelling" and reserve.stat().st_size:
                raise StorageError("the disk is full", full=True)
            put(record)

        monkeypatch.setattr(it.store.database, "put_record", put_in_reserve)
        assert (await it.batches.cancel("b")).record.status == "cancelling"
        assert (await it.end()).record.status == "cancelled"
        assert reserve.stat().st_size == SIZE


async def test_results_that_cannot_be_kept_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "MAX_BYTES", 2000)
    async with running(tmp_path) as it:
        await it.create([line(number) for number in range(500)])
        assert (await it.end()).progress.completed == 500
