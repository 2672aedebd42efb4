"""The database: a table of files and one of batches, in SQLite with a write-ahead log.

A record is a JSON text, so that fields can be added; what is searched by is a column. Used by one thread. Knows no
files but its own.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from toka_async.batches.disk import StorageError
from toka_async.batches.records import FINAL, Batch, BatchRecord, FileRecord, Progress

VERSION = 2
SCHEMA = f"""
CREATE TABLE files (
    serial INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    purpose TEXT NOT NULL,
    expires_at INTEGER,
    record TEXT NOT NULL,
    owner TEXT NOT NULL DEFAULT ''
);
CREATE INDEX files_expire ON files (expires_at) WHERE expires_at IS NOT NULL;
CREATE TABLE batches (
    serial INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    input_file_id TEXT NOT NULL,
    is_open INTEGER NOT NULL,
    record TEXT NOT NULL,
    progress BLOB NOT NULL,
    owner TEXT NOT NULL DEFAULT ''
);
CREATE INDEX batches_open ON batches (is_open) WHERE is_open = 1;
PRAGMA user_version = {VERSION};
"""
OWNERS = """
ALTER TABLE files ADD COLUMN owner TEXT NOT NULL DEFAULT '';
ALTER TABLE batches ADD COLUMN owner TEXT NOT NULL DEFAULT '';
PRAGMA user_version = 2;
"""
CHANGES = {0: SCHEMA, 1: OWNERS}  # by the version that they are made to

Order = Literal["asc", "desc"]

_FILE = msgspec.json.Decoder(FileRecord)
_BATCH = msgspec.json.Decoder(BatchRecord)
_PROGRESS = msgspec.msgpack.Decoder(Progress)


class Database:
    """Transactions are begun and ended by the caller (`Writer`). A file of an earlier version becomes one of this.

    Raises:
        StorageError: the file is no database, or one of a later version.
    """

    def __init__(self, path: Path) -> None:
        try:
            self.connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self.connection.execute("PRAGMA journal_mode = WAL")
            self.connection.execute("PRAGMA synchronous = FULL")  # a commit is on the disk when it returns
            (version,) = self.connection.execute("PRAGMA user_version").fetchone()
            if version in CHANGES:
                self.connection.executescript(f"BEGIN; {CHANGES[version]} COMMIT;")
            elif version != VERSION:
                raise StorageError(f"{path} is of version {version}; this program knows version {VERSION}")
        except sqlite3.Error as error:
            raise StorageError(f"{path}: {error}", full=is_full(error)) from error

    def close(self) -> None:
        self.connection.close()

    # ---- files -------------------------------------------------------------------------------------------------------

    def add_file(self, record: FileRecord) -> None:
        self.connection.execute(
            "INSERT INTO files (id, purpose, expires_at, record, owner) VALUES (?, ?, ?, ?, ?)",
            (record.id, record.purpose, record.expires_at, _text(record), record.owner),
        )

    def file(self, file_id: str) -> FileRecord | None:
        row = self.connection.execute("SELECT record FROM files WHERE id = ?", (file_id,)).fetchone()
        return None if row is None else _FILE.decode(row[0])

    def files(
        self, purpose: str | None, after: str | None, order: Order, limit: int, now: int, viewer: str | None
    ) -> list[FileRecord] | None:
        """At most `limit` that have not expired; None when there is no file `after`."""
        where, values = ["(expires_at IS NULL OR expires_at > ?)"], [now]
        rows = self._page("files", where, [*values], purpose, after, order, limit, viewer)
        return None if rows is None else [_FILE.decode(row[0]) for row in rows]

    def file_ids(self) -> list[str]:
        return [row[0] for row in self.connection.execute("SELECT id FROM files")]

    def expired_files(self, now: int) -> list[FileRecord]:
        rows = self.connection.execute("SELECT record FROM files WHERE expires_at <= ?", (now,))
        return [_FILE.decode(row[0]) for row in rows]

    def remove_file(self, file_id: str) -> None:
        self.connection.execute("DELETE FROM files WHERE id = ?", (file_id,))

    # ---- batches -----------------------------------------------------------------------------------------------------

    def add_batch(self, record: BatchRecord) -> None:
        self.connection.execute(
            "INSERT INTO batches (id, input_file_id, is_open, record, progress, owner) VALUES (?, ?, 1, ?, ?, ?)",
            (record.id, record.input_file_id, _text(record), msgspec.msgpack.encode(Progress()), record.owner),
        )

    def batch(self, batch_id: str) -> Batch | None:
        row = self.connection.execute("SELECT record, progress FROM batches WHERE id = ?", (batch_id,)).fetchone()
        return None if row is None else _batch(row)

    def batches(self, after: str | None, limit: int, viewer: str | None) -> list[Batch] | None:
        """The newest first, at most `limit`; None when there is no batch `after`."""
        rows = self._page("batches", [], [], None, after, "desc", limit, viewer)
        return None if rows is None else [_batch(row) for row in rows]

    def open_batches(self) -> list[Batch]:
        """Those that have not ended, the oldest first."""
        query = "SELECT record, progress FROM batches WHERE is_open = 1 ORDER BY serial"
        return [_batch(row) for row in self.connection.execute(query)]

    def put_record(self, record: BatchRecord) -> None:
        self.connection.execute(
            "UPDATE batches SET is_open = ?, record = ? WHERE id = ?",
            (record.status not in FINAL, _text(record), record.id),
        )

    def put_progress(self, batch_id: str, progress: Progress) -> None:
        self.connection.execute(
            "UPDATE batches SET progress = ? WHERE id = ?", (msgspec.msgpack.encode(progress), batch_id)
        )

    def _page(
        self,
        table: Literal["files", "batches"],
        where: list[str],
        values: list[str | int],
        purpose: str | None,
        after: str | None,
        order: Order,
        limit: int,
        viewer: str | None,
    ) -> Sequence[tuple[bytes, ...]] | None:
        seen: list[str] = [] if viewer is None else [viewer]
        is_seen = "owner IN ('', ?)" if seen else "1"
        where, values = [*where, is_seen], [*values, *seen]
        if purpose is not None:
            where, values = [*where, "purpose = ?"], [*values, purpose]
        if after is not None:
            query = f"SELECT serial FROM {table} WHERE id = ? AND {is_seen}"
            row = self.connection.execute(query, (after, *seen)).fetchone()
            if row is None:
                return None
            where, values = [*where, f"serial {'<' if order == 'desc' else '>'} ?"], [*values, row[0]]
        columns = "record" if table == "files" else "record, progress"
        query = f"SELECT {columns} FROM {table} WHERE {' AND '.join(where)} ORDER BY serial {order} LIMIT ?"
        return self.connection.execute(query, [*values, limit]).fetchall()


def is_full(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL


def _text(record: FileRecord | BatchRecord) -> str:
    return msgspec.json.encode(record).decode()


def _batch(row: Sequence[bytes]) -> Batch:
    return Batch(_BATCH.decode(row[0]), _PROGRESS.decode(row[1]))
