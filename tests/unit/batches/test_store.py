from __future__ import annotations

import sqlite3
from pathlib import Path

import msgspec
import pytest

from toka_async.batches.disk import Disk, StorageError
from toka_async.batches.records import BatchProgress, FileRecord
from toka_async.batches.store import Store

FILE = FileRecord(id="file-1", filename="in", purpose="batch", bytes=1, created_at=1)


def opened(folder: Path) -> Store:
    return Store(folder, lambda: 1000)


def put(store: Store, record: FileRecord = FILE) -> None:
    upload = store.folder.uploads / "one"
    upload.write_bytes(b"x")
    store.add_file(record, upload)


def test_a_folder_belongs_to_one(tmp_path: Path) -> None:
    store = opened(tmp_path)
    with pytest.raises(StorageError, match="in use by another process"):
        opened(tmp_path)
    store.close()
    opened(tmp_path).close()


def test_what_cannot_be_used_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="file"):
        opened(tmp_path / "file")
    (tmp_path / "batches.sqlite").write_bytes(b"no database, but long enough to be looked at as one" * 100)
    with pytest.raises(StorageError, match=r"batches\.sqlite"):
        opened(tmp_path)


def test_a_database_of_a_later_version_is_left_alone(tmp_path: Path) -> None:
    opened(tmp_path).close()
    with sqlite3.connect(tmp_path / "batches.sqlite") as connection:
        connection.execute("PRAGMA user_version = 9")
    connection.close()
    with pytest.raises(StorageError, match="version 9"):
        opened(tmp_path)


def test_a_database_of_the_first_version_is_brought_up_to_date(tmp_path: Path) -> None:
    """What is in it has no owner: it is everybody's."""
    with sqlite3.connect(tmp_path / "batches.sqlite") as connection:
        connection.executescript("""
            CREATE TABLE files (serial INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE,
                purpose TEXT NOT NULL, expires_at INTEGER, record TEXT NOT NULL);
            CREATE INDEX files_expire ON files (expires_at) WHERE expires_at IS NOT NULL;
            CREATE TABLE batches (serial INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE,
                input_file_id TEXT NOT NULL, is_open INTEGER NOT NULL, record TEXT NOT NULL, progress BLOB NOT NULL);
            CREATE INDEX batches_open ON batches (is_open) WHERE is_open = 1;
            PRAGMA user_version = 1;
            INSERT INTO files (id, purpose, record) VALUES ('file-old', 'batch',
                '{"id":"file-old","filename":"in","purpose":"batch","bytes":1,"created_at":1}');
        """)
        batch = '{"id":"b","endpoint":"","input_file_id":"file-old","output_id":"o","error_id":"e","created_at":1}'
        row = ("b", "file-old", 1, batch, msgspec.msgpack.encode(BatchProgress()))
        connection.execute(
            "INSERT INTO batches (id, input_file_id, is_open, record, progress) VALUES (?, ?, ?, ?, ?)", row
        )
    connection.close()
    for _ in range(2):
        store = opened(tmp_path)
        assert store.file("file-old", "name alice").owner == ""
        assert [each.record.id for each in store.batches(None, 9, "name bob")] == ["b"]
        if not store.database.file("file-1"):
            put(store, msgspec.structs.replace(FILE, owner="name alice"))
        seen = [[each.id for each in store.files(None, None, "asc", 9, viewer)] for viewer in (None, "name bob")]
        assert seen == [["file-old", "file-1"], ["file-old"]]
        store.close()


def test_nobody_else_can_read_it(tmp_path: Path) -> None:
    store = opened(tmp_path / "data")
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700
    store.close()


def test_what_no_transaction_knows_is_removed_at_the_start(tmp_path: Path) -> None:
    """If its name is one that the store gives, and it is a file."""
    store = opened(tmp_path)
    put(store)
    (tmp_path / "files" / f"file-{'a' * 24}").touch()
    store.folder.make_upload().touch()
    kept = [tmp_path / "files" / "notes.txt", tmp_path / "uploads" / "mine"]
    for path in kept:
        path.touch()
    kept += [tmp_path / "files" / "lost+found", tmp_path / "files" / f"file-{'b' * 24}", tmp_path / "uploads" / "c"]
    for path in kept[2:]:
        path.mkdir()
    kept += [tmp_path / "files" / f"file-{'d' * 24}"]
    kept[-1].symlink_to("notes.txt")
    store.close()
    store = opened(tmp_path)
    left = [*(tmp_path / "files").iterdir(), *(tmp_path / "uploads").iterdir()]
    assert sorted(left) == sorted([*kept, tmp_path / "files" / "file-1"])
    store.close()


def test_an_append_cuts_what_was_not_committed(tmp_path: Path) -> None:
    disk, path = Disk(), tmp_path / "file"
    disk.append(path, 0, b"abcdef")
    disk.append(path, 2, b"XY")
    assert path.read_bytes() == b"abXY"
    with pytest.raises(StorageError, match="4 bytes, 9 were written"):
        disk.append(path, 9, b"z")
