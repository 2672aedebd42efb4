"""A database of which somebody, or a disk, has spoilt something: the rest of it works."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from toka_async.batches.disk import StorageError
from toka_async.batches.records import BatchRecord, DoneLine, FileRecord
from toka_async.batches.store import InUseError, NotFoundError, Store

ID = "file-{:024x}".format


def batch_record(name: str) -> BatchRecord:
    number = int(name[1:])
    return BatchRecord(
        id=name,
        endpoint="/v1/completions",
        input_file_id=ID(0),
        output_id=ID(10 * number),
        error_id=ID(10 * number + 1),
        created_at=1,
        owner="name alice",
    )


def filled(folder: Path) -> None:
    """An input file; of its batches b1 has ended, b2 and b3 are in progress with a line of two done, b4 is new."""
    store = Store(folder, lambda: 1000)
    upload = store.folder.make_upload()
    upload.write_bytes(b'{"custom_id": "a"}\n{"custom_id": "b"}\n')
    store.add_file(FileRecord(id=ID(0), filename="in", purpose="batch", bytes=38, created_at=1), upload)
    for name in ("b1", "b2", "b3", "b4"):
        store.add_batch(batch_record(name))
        if name != "b4":
            store.accept(name, 2, [])
            store.finish_lines(name, [DoneLine(line=0, end=19, failed=False, data=b"answer a\n")])
    store.finish_lines("b1", [DoneLine(line=1, end=38, failed=True, data=b"answer b\n")])
    store.end("b1", "completed")
    store.finalize("b1")
    store.close()


def change(folder: Path, statement: str) -> None:
    with closing(sqlite3.connect(folder / "batches.sqlite", isolation_level=None)) as connection:
        connection.execute(statement)


def statuses(store: Store) -> dict[str, str]:
    return {each.record.id: each.record.status for each in store.batches(None, 9)}


def test_a_files_broken_record_costs_its_name(tmp_path: Path) -> None:
    filled(tmp_path)
    change(tmp_path, f"UPDATE files SET record = '{{' WHERE id = '{ID(0)}'")
    with closing(Store(tmp_path, lambda: 1000)) as store:
        broken = store.file(ID(0))
        assert (broken.filename, broken.bytes, broken.purpose) == ("unknown", 38, "batch")
        assert {each.id for each in store.files(None, None, "asc", 9)} == {ID(0), ID(10), ID(11)}
        assert store.path(ID(0)).exists()


def test_a_batchs_broken_record_costs_that_batch(tmp_path: Path) -> None:
    filled(tmp_path)
    change(tmp_path, "UPDATE batches SET record = x'ff' WHERE id = 'b2'")
    for _ in range(2):
        with closing(Store(tmp_path, lambda: 1000)) as store:
            assert statuses(store) == {"b1": "completed", "b2": "failed", "b3": "in_progress", "b4": "validating"}
            assert [each.id for each in store.unfinished] == ["b3", "b4"]
            broken = store.batch("b2", "name alice").record
            assert [fault.code for fault in broken.faults] == ["record_damaged"]
            with pytest.raises(NotFoundError):
                store.batch("b2", "name bob")
            assert store.path(ID(20)).exists()  # nobody knows whose it is, and it may be of use
            with pytest.raises(InUseError):
                store.remove_file(ID(0))
            assert len(store.batches(None, 2)) == 2  # pages are as long as they should be
    with closing(Store(tmp_path, lambda: 1000)) as store:
        store.remove_batch("b2")
        assert "b2" not in statuses(store)
    with closing(Store(tmp_path, lambda: 1000)) as store:
        assert not store.path(ID(20)).exists()


def test_a_batch_whose_progress_is_broken_has_failed_with_what_it_had(tmp_path: Path) -> None:
    filled(tmp_path)
    change(tmp_path, "UPDATE batches SET progress = x'ff' WHERE id IN ('b2', 'b4')")
    with (tmp_path / "files" / ID(20)).open("ab") as output:
        output.write(b"half a li")
    for _ in range(2):
        with closing(Store(tmp_path, lambda: 1000)) as store:
            assert statuses(store) == {"b1": "completed", "b2": "failed", "b3": "in_progress", "b4": "failed"}
            batch = store.batch("b2")
            assert [fault.code for fault in batch.record.faults] == ["progress_damaged"]
            assert (batch.progress.completed, batch.progress.output_bytes) == (1, 9)
            assert store.file(ID(20)).bytes == 9
            assert store.path(ID(20)).read_bytes() == b"answer a\n"


def test_an_ended_batch_whose_progress_is_broken_keeps_its_files(tmp_path: Path) -> None:
    filled(tmp_path)
    change(tmp_path, "UPDATE batches SET progress = 'x', is_open = 1 WHERE id = 'b1'")
    with closing(Store(tmp_path, lambda: 1000)) as store:
        batch = store.batch("b1")
        assert batch.record.status == "completed"
        assert (batch.progress.output_bytes, batch.progress.error_bytes) == (9, 9)
        assert [each.id for each in store.unfinished] == ["b2", "b3", "b4"]


def test_a_name_that_leads_elsewhere_is_none(tmp_path: Path) -> None:
    filled(tmp_path)
    (tmp_path.parent / "outside").touch()
    change(tmp_path, f"UPDATE files SET id = '../../outside', expires_at = 5 WHERE id = '{ID(10)}'")
    change(tmp_path, f"UPDATE files SET id = '../../outside2' WHERE id = '{ID(11)}'")
    with closing(Store(tmp_path, lambda: 1000)) as store, pytest.raises(NotFoundError):
        store.file("../../outside2")
    assert (tmp_path.parent / "outside").exists()


@pytest.mark.parametrize("statement", ["DROP TABLE files", "PRAGMA application_id = 5"])
def test_a_database_that_is_not_ours_is_told_in_a_line(tmp_path: Path, statement: str) -> None:
    filled(tmp_path)
    change(tmp_path, statement)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(StorageError, match=r"batches\.sqlite"):
        Store(tmp_path, lambda: 1000)
    assert set(before) <= set(tmp_path.rglob("*"))


def test_another_programs_database_is_left_as_it_is(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "batches.sqlite")) as connection:
        connection.execute("CREATE TABLE recipes (name TEXT)")
    before = (tmp_path / "batches.sqlite").read_bytes()
    with pytest.raises(StorageError, match="another program"):
        Store(tmp_path, lambda: 1000)
    assert (tmp_path / "batches.sqlite").read_bytes() == before


def test_spoilt_pages_are_told_in_a_line(tmp_path: Path) -> None:
    filled(tmp_path)
    with (tmp_path / "batches.sqlite").open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * 8192)
    with pytest.raises(StorageError, match=r"batches\.sqlite: .*malformed"):
        Store(tmp_path, lambda: 1000)


def test_columns_of_a_version_before_limits_are_filled(tmp_path: Path) -> None:
    """What was kept counts."""
    filled(tmp_path)
    for statement in (
        "DROP INDEX files_owner",
        "ALTER TABLE files DROP COLUMN bytes",
        "DROP INDEX batches_input",
        "DROP INDEX batches_owner",
        "DROP INDEX batches_expire",
        "ALTER TABLE batches DROP COLUMN expires_at",
        "PRAGMA application_id = 0",
        "PRAGMA user_version = 2",
    ):
        change(tmp_path, statement)
    record = msgspec.json.encode(FileRecord(id="x", filename="", purpose="batch", bytes=7, created_at=1)).decode()
    change(tmp_path, f"INSERT INTO files (id, purpose, record) VALUES ('x', 'batch', '{record}'), ('y', '', '{{')")
    with closing(Store(tmp_path, lambda: 1000)) as store:
        assert store.database.count_files("") == (3, 45)
        assert store.database.count_files("name alice") == (2, 18)
        assert store.database.num_open_batches("name alice") == 3
