"""The database: a table of files and one of batches, in SQLite with a write-ahead log.

A record is JSON, so that fields can be added; searched fields are columns. A record that cannot be read costs only
itself: its file keeps what the columns say, its batch has failed. Used by one thread. Knows no other files.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import msgspec

from toka_async.batches.disk import StorageError
from toka_async.batches.records import FINAL, Batch, BatchProgress, BatchRecord, FileRecord, make_broken_batch

VERSION = 3
APPLICATION = 0x746F6B61  # "toka" marks our databases, except those of versions 1 and 2
SCHEMA = f"""
CREATE TABLE files (
    serial INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    purpose TEXT NOT NULL,
    expires_at INTEGER,
    record TEXT NOT NULL,
    owner TEXT NOT NULL DEFAULT '',
    bytes INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX files_expire ON files (expires_at) WHERE expires_at IS NOT NULL;
CREATE INDEX files_owner ON files (owner, bytes);
CREATE TABLE batches (
    serial INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    input_file_id TEXT NOT NULL,
    is_open INTEGER NOT NULL,
    record TEXT NOT NULL,
    progress BLOB NOT NULL,
    owner TEXT NOT NULL DEFAULT '',
    expires_at INTEGER
);
CREATE INDEX batches_open ON batches (is_open) WHERE is_open = 1;
CREATE INDEX batches_input ON batches (input_file_id) WHERE is_open = 1;
CREATE INDEX batches_owner ON batches (owner) WHERE is_open = 1;
CREATE INDEX batches_expire ON batches (expires_at) WHERE expires_at IS NOT NULL;
PRAGMA application_id = {APPLICATION};
PRAGMA user_version = {VERSION};
"""
OWNERS = """
ALTER TABLE files ADD COLUMN owner TEXT NOT NULL DEFAULT '';
ALTER TABLE batches ADD COLUMN owner TEXT NOT NULL DEFAULT '';
PRAGMA user_version = 2;
"""
LIMITS = f"""
ALTER TABLE files ADD COLUMN bytes INTEGER NOT NULL DEFAULT 0;
UPDATE files SET bytes = coalesce(json_extract(record, '$.bytes'), 0) WHERE json_valid(record);
CREATE INDEX files_owner ON files (owner, bytes);
ALTER TABLE batches ADD COLUMN expires_at INTEGER;
CREATE INDEX batches_input ON batches (input_file_id) WHERE is_open = 1;
CREATE INDEX batches_owner ON batches (owner) WHERE is_open = 1;
CREATE INDEX batches_expire ON batches (expires_at) WHERE expires_at IS NOT NULL;
PRAGMA application_id = {APPLICATION};
PRAGMA user_version = 3;
"""
CHANGES = {0: SCHEMA, 1: OWNERS, 2: LIMITS}  # version -> the change that updates it
FILE_COLUMNS = "id, record, purpose, bytes, expires_at, owner"
BATCH_COLUMNS = "id, record, progress, input_file_id, owner"

Order = Literal["asc", "desc"]

_FILE = msgspec.json.Decoder(FileRecord)
_BATCH = msgspec.json.Decoder(BatchRecord)
_PROGRESS = msgspec.msgpack.Decoder(BatchProgress)
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError)  # decoders raise these


class Database:
    """Reads and writes records in transactions that the caller (`Writer`) begins and ends.

    Opening updates a file of an earlier version. Raises StorageError when the file is no database, another program's,
    or one of a later version.
    """

    def __init__(self, path: Path) -> None:
        with database_errors(path):
            self.connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            try:
                self._open(path)
            except BaseException:
                self.connection.close()
                raise

    def _open(self, path: Path) -> None:
        version, application = self._number("PRAGMA user_version"), self._number("PRAGMA application_id")
        if application not in (0, APPLICATION) or (not version and self._number("SELECT count(*) FROM sqlite_master")):
            raise StorageError(f"{path} is a database of another program; name an empty or a new folder")
        if not 0 <= version <= VERSION:
            raise StorageError(f"{path} is of version {version}; this program knows version {VERSION}")
        self.connection.execute("PRAGMA journal_mode = WAL")
        self.connection.execute("PRAGMA synchronous = FULL")  # a commit is on the disk when it returns
        while (version := self._number("PRAGMA user_version")) in CHANGES:
            self.connection.executescript(f"BEGIN; {CHANGES[version]} COMMIT;")

    def _number(self, query: str, *values: str) -> int:
        row = self.connection.execute(query, values).fetchone()
        return int(row[0])

    def close(self) -> None:
        self.connection.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Runs a transaction where there is no `Writer` yet."""
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self.connection.execute("ROLLBACK")
            raise
        self.connection.execute("COMMIT")

    # ---- files -------------------------------------------------------------------------------------------------------

    def add_file(self, record: FileRecord) -> None:
        self.connection.execute(
            "INSERT OR REPLACE INTO files (id, purpose, expires_at, record, owner, bytes) VALUES (?, ?, ?, ?, ?, ?)",
            (record.id, record.purpose, record.expires_at, _text(record), record.owner, record.bytes),
        )

    def file(self, file_id: str) -> FileRecord | None:
        query = f"SELECT {FILE_COLUMNS} FROM files WHERE id = ?"
        row = self.connection.execute(query, (file_id,)).fetchone()
        return None if row is None else _file(row)

    def files(
        self, purpose: str | None, after: str | None, order: Order, limit: int, now: int, viewer: str | None
    ) -> list[FileRecord] | None:
        """Returns at most `limit` files that have not expired; None when there is no file `after`."""
        where, values = ["(expires_at IS NULL OR expires_at > ?)"], [now]
        rows = self._page("files", where, [*values], purpose, after, order, limit, viewer)
        return None if rows is None else [_file(row) for row in rows]

    def file_ids(self) -> list[str]:
        return [row[0] for row in self.connection.execute("SELECT id FROM files")]

    def list_expired_files(self, now: int) -> list[str]:
        return [row[0] for row in self.connection.execute("SELECT id FROM files WHERE expires_at <= ?", (now,))]

    def count_files(self, owner: str) -> tuple[int, int]:
        """Returns the number and the bytes of the owner's files."""
        query = "SELECT count(*), coalesce(sum(bytes), 0) FROM files WHERE owner = ?"
        num_files, num_bytes = self.connection.execute(query, (owner,)).fetchone()
        return num_files, num_bytes

    def remove_file(self, file_id: str) -> None:
        self.connection.execute("DELETE FROM files WHERE id = ?", (file_id,))

    # ---- batches -----------------------------------------------------------------------------------------------------

    def add_batch(self, record: BatchRecord) -> None:
        self.connection.execute(
            "INSERT INTO batches (id, input_file_id, is_open, record, progress, owner) VALUES (?, ?, 1, ?, ?, ?)",
            (record.id, record.input_file_id, _text(record), msgspec.msgpack.encode(BatchProgress()), record.owner),
        )

    def batch(self, batch_id: str) -> Batch | None:
        query = f"SELECT {BATCH_COLUMNS} FROM batches WHERE id = ?"
        row = self.connection.execute(query, (batch_id,)).fetchone()
        return None if row is None else self._batch(row)

    def batches(self, after: str | None, limit: int, viewer: str | None) -> list[Batch] | None:
        """Returns at most `limit` batches, newest first; None when there is no batch `after`."""
        rows = self._page("batches", [], [], None, after, "desc", limit, viewer)
        return None if rows is None else [self._batch(row) for row in rows]

    def open_batches(self) -> Iterator[Batch]:
        """Yields the batches that have not ended, oldest first."""
        query = f"SELECT {BATCH_COLUMNS} FROM batches WHERE is_open = 1 ORDER BY serial"
        return map(self._batch, self.connection.execute(query))

    def num_open_batches(self, owner: str) -> int:
        return self._number("SELECT count(*) FROM batches WHERE is_open = 1 AND owner = ?", owner)

    def find_reader(self, file_id: str) -> str | None:
        """Returns the id of a batch that has not ended and has the file as its input."""
        query = "SELECT id FROM batches WHERE is_open = 1 AND input_file_id = ?"
        row = self.connection.execute(query, (file_id,)).fetchone()
        return None if row is None else row[0]

    def remove_batch(self, batch_id: str) -> None:
        self.connection.execute("DELETE FROM batches WHERE id = ?", (batch_id,))

    def remove_expired_batches(self, now: int) -> None:
        self.connection.execute("DELETE FROM batches WHERE expires_at <= ?", (now,))

    def put_record(self, record: BatchRecord) -> None:
        self.connection.execute(
            "UPDATE batches SET is_open = ?, record = ?, expires_at = ? WHERE id = ?",
            (record.status not in FINAL, _text(record), record.forgotten_at, record.id),
        )

    def put_progress(self, batch_id: str, progress: BatchProgress) -> None:
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
        columns = FILE_COLUMNS if table == "files" else BATCH_COLUMNS
        query = f"SELECT {columns} FROM {table} WHERE {' AND '.join(where)} ORDER BY serial {order} LIMIT ?"
        return self.connection.execute(query, [*values, limit]).fetchall()

    def _batch(self, row: Sequence[Any]) -> Batch:
        """Reads a batch. If it cannot be read, it has failed, and its progress has only what its files show."""
        batch_id, text, packed, input_file_id, owner = row
        try:
            record = _BATCH.decode(text)
        except UNREADABLE:
            return Batch(make_broken_batch(batch_id, input_file_id, owner), BatchProgress())
        try:
            return Batch(record, _PROGRESS.decode(packed))
        except UNREADABLE:
            output, errors = (self.file(file_id) for file_id in (record.output_id, record.error_id))
            sizes = [0 if file is None else file.bytes for file in (output, errors)]
            return Batch(record, BatchProgress(output_bytes=sizes[0], error_bytes=sizes[1], is_broken=True))


@contextmanager
def database_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        message = f"{path}: {error}; put back a copy of the folder, or name another"
        raise StorageError(message, full=is_full(error)) from error


def is_full(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL


def _text(record: FileRecord | BatchRecord) -> str:
    return msgspec.json.encode(record).decode()


def _file(row: Sequence[Any]) -> FileRecord:
    """Reads a file; if its record cannot be read, it has lost its name and its date."""
    file_id, text, purpose, num_bytes, expires_at, owner = row
    with suppress(*UNREADABLE):
        record = _FILE.decode(text)
        if record.id == file_id:
            return record
    return FileRecord(
        id=file_id,
        filename="unknown",
        purpose=purpose,
        bytes=num_bytes,
        created_at=0,
        expires_at=expires_at,
        owner=owner,
    )
