from __future__ import annotations

from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from tests.unit.batches.test_database import ID, batch_record
from toka_async.batches.quota import ANY, Quota, QuotaError
from toka_async.batches.records import FileRecord
from toka_async.batches.store import InUseError, NotFoundError, Store


def put(store: Store, number: int, quota: Quota, owner: str = "", size: int = 1 << 20) -> None:
    upload = store.folder.make_upload()
    upload.touch()
    record = FileRecord(id=ID(number), filename="in", purpose="batch", bytes=size, created_at=1, owner=owner)
    store.add_file(record, upload, quota)


def test_files_and_their_bytes_are_limited_by_owner(tmp_path: Path) -> None:
    with closing(Store(tmp_path, lambda: 1000)) as store:
        put(store, 0, Quota(files=2), "alice")
        put(store, 1, Quota(files=2, num_bytes=2 << 20), "alice")
        with pytest.raises(QuotaError, match=r"2 files of one owner \(batches\.key_max_files\)"):
            put(store, 2, Quota(files=2), "alice")
        with pytest.raises(
            QuotaError, match=r"2 MiB \(batches\.key_max_files_mb\), and with this one they would have 3"
        ):
            put(store, 2, Quota(num_bytes=2 << 20), "alice")
        put(store, 2, Quota(files=1, num_bytes=1 << 20), "bob")
        put(store, 3, ANY, "alice")


def test_open_batches_are_limited_by_owner(tmp_path: Path) -> None:
    with closing(Store(tmp_path, lambda: 1000)) as store:
        put(store, 0, ANY)
        store.add_batch(batch_record("b1"), Quota(batches=1))
        with pytest.raises(QuotaError, match=r"1 batches of one owner .*batches\.key_max_open_batches"):
            store.add_batch(batch_record("b2"), Quota(batches=1))
        store.end("b1", "cancelled")
        store.finalize("b1")
        store.add_batch(batch_record("b2"), Quota(batches=1))


def test_a_batch_that_has_ended_can_be_forgotten(tmp_path: Path) -> None:
    with closing(Store(tmp_path, lambda: 1000)) as store:
        put(store, 0, ANY)
        store.add_batch(batch_record("b1"))
        with pytest.raises(InUseError):
            store.remove_batch("b1", "name alice")
        store.end("b1", "cancelled")
        store.finalize("b1")
        with pytest.raises(NotFoundError):
            store.remove_batch("b1", "name bob")
        store.remove_batch("b1", "name alice")
        with pytest.raises(NotFoundError):
            store.batch("b1")
        store.remove_file(ID(0))


def test_a_batch_goes_with_its_results(tmp_path: Path) -> None:
    now = 1000.0
    with closing(Store(tmp_path, lambda: now)) as store:
        put(store, 0, ANY)
        for name, lasts in (("b1", 3600), ("b2", None)):
            record = batch_record(name)
            store.add_batch(msgspec.structs.replace(record, output_expires_after=lasts))
            store.end(name, "cancelled")
            store.finalize(name)
        now += 3599
        store.remove_expired()
        assert len(store.batches(None, 9)) == 2
        now += 1
        store.remove_expired()
        assert [each.record.id for each in store.batches(None, 9)] == ["b2"]
