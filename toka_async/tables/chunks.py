"""Reads the rows of a data set in pieces, so that files larger than the memory can be read.

Parquet and Arrow rows stay columns of pyarrow until somebody asks for their values; rows of JSONL are dicts.
"""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import msgspec

from toka_async.tables.source import SUFFIXES, Source, TableError

if TYPE_CHECKING:
    import pyarrow as pa

Row: TypeAlias = dict[str, Any]

CHUNK = 1024  # rows
INDEXED = b"ARROW1"  # how an Arrow file with an index begins
READ_BYTES = 1 << 20  # of a column, that are read at once


class Chunk(Protocol):
    """Some rows, one after the other."""

    def __len__(self) -> int: ...

    def read(self, column: str) -> list[Any]:
        """The column's values; None where a row has none."""
        ...

    def find_faults(self) -> dict[int, str]:
        """What is wrong with rows that cannot be read, by their place in the chunk."""
        ...

    def read_rows(self, columns: Sequence[str]) -> list[Row]:
        """The rows with these columns only. A row lacks a column only where the file's row does."""
        ...

    def convert(self, schema: pa.Schema) -> list[pa.Array]:
        """The columns of the schema. Raises TableError for values of another type."""
        ...


@dataclass(frozen=True, slots=True)
class ArrowChunk:
    batch: pa.RecordBatch

    def __len__(self) -> int:
        return int(self.batch.num_rows)

    def read(self, column: str) -> list[Any]:
        with _arrow_errors("a file of the data set"):
            return list(self.batch.column(column).to_pylist())

    def find_faults(self) -> dict[int, str]:
        return {}

    def read_rows(self, columns: Sequence[str]) -> list[Row]:
        if not columns:
            return [{} for _ in range(len(self))]
        with _arrow_errors("a file of the data set"):
            return list(self.batch.select(list(columns)).to_pylist())

    def convert(self, schema: pa.Schema) -> list[pa.Array]:
        with _arrow_errors("a file of the data set"):
            return [self.batch.column(field.name).cast(field.type) for field in schema]


@dataclass(frozen=True, slots=True)
class JsonChunk:
    """rows: a text in place of a row that cannot be read says why."""

    rows: list[Row | str]

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, column: str) -> list[Any]:
        return [None if isinstance(row, str) else row.get(column) for row in self.rows]

    def list_names(self) -> list[str]:
        """The columns, in the order in which rows name them first."""
        return list(dict.fromkeys(name for row in self.rows if isinstance(row, dict) for name in row))

    def find_faults(self) -> dict[int, str]:
        return {place: row for place, row in enumerate(self.rows) if isinstance(row, str)}

    def read_rows(self, columns: Sequence[str]) -> list[Row]:
        return [
            {} if isinstance(row, str) else {name: row[name] for name in columns if name in row} for row in self.rows
        ]

    def convert(self, schema: pa.Schema) -> list[pa.Array]:
        pa = import_arrow()
        arrays = []
        for field in schema:
            with _arrow_errors(f"column {field.name!r}"):
                arrays.append(pa.array(self.read(field.name), type=field.type))
        return arrays


def read_chunks(source: Source, columns: Sequence[str] | None = None) -> Iterator[Chunk]:
    """Read the rows in order. columns: what is needed of Parquet's; None: all.

    Raises:
        TableError: a file cannot be read, or pyarrow is needed and is not installed.
    """
    for path in source.files:
        match source.form:
            case "parquet":
                yield from _read_parquet(path, columns)
            case "arrow":
                yield from _read_arrow(path)
            case "jsonl":
                yield from _read_jsonl(path)


def list_columns(source: Source) -> list[str]:
    """The names of the columns, of the first file or of all rows of JSONL.

    Raises:
        TableError: a file cannot be read, or no row of JSONL has a column.
    """
    if source.form != "jsonl":
        return [name for path in source.files[:1] for name in _read_file_schema(path).names]
    names: dict[str, None] = {}
    faults: dict[int, str] = {}
    for chunk in _read_all_jsonl(source):
        names.update(dict.fromkeys(chunk.list_names()))
        faults = faults or chunk.find_faults()
    if not names:
        raise TableError(next(iter(faults.values()), "the data set has no rows"))
    return list(names)


def read_schema(source: Source, columns: Sequence[str] | None = None) -> pa.Schema:
    """The types of the columns, or of some of them. Reads JSONL whole.

    Raises:
        TableError: a file cannot be read, or the types of a column differ between rows or files.
    """
    pa = import_arrow()
    if source.form == "jsonl":
        schemas = [_infer_schema(source, columns)]
    else:
        schemas = [_read_file_schema(path) for path in source.files]
    first = schemas[0] if schemas else pa.schema([])
    names = first.names if columns is None else columns
    for path, schema in zip(source.files, schemas, strict=False):
        for name in names:
            if name in first.names and (name not in schema.names or schema.field(name).type != first.field(name).type):
                raise TableError(f"{path}: its column {name!r} is not of the type that it has in {source.files[0]}")
    return pa.schema([first.field(name) if name in first.names else pa.field(name, pa.null()) for name in names])


def import_arrow() -> Any:
    """pyarrow. Raises TableError without it."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise TableError("Parquet and Arrow files need pyarrow: pip install 'toka-async[data]'") from None
    return pyarrow


def _read_parquet(path: Path, columns: Sequence[str] | None) -> Iterator[ArrowChunk]:
    pa = import_arrow()
    settings = {"buffer_size": READ_BYTES, "pre_buffer": False}  # otherwise it keeps every row group that it has read
    with _arrow_errors(str(path)), pa.parquet.ParquetFile(path, **settings) as file:
        for batch in file.iter_batches(CHUNK, columns=columns and list(columns), use_threads=False):
            yield ArrowChunk(batch)


def _read_arrow(path: Path) -> Iterator[ArrowChunk]:
    with _arrow_errors(str(path)), _open_arrow(path) as batches:
        for batch in batches:
            for start in range(0, batch.num_rows, CHUNK):
                yield ArrowChunk(batch.slice(start, CHUNK))


@contextmanager
def _open_arrow(path: Path) -> Iterator[Iterator[pa.RecordBatch]]:
    """Open a stream, as datasets writes it, or a file with an index."""
    pa = import_arrow()
    with pa.OSFile(str(path)) as file:
        if file.read(len(INDEXED)) == INDEXED:
            reader = pa.ipc.open_file(file)
            yield (reader.get_batch(number) for number in range(reader.num_record_batches))
        else:
            file.seek(0)
            yield iter(pa.ipc.open_stream(file))


def _read_file_schema(path: Path) -> pa.Schema:
    pa = import_arrow()
    with _arrow_errors(str(path)):
        if SUFFIXES[path.suffix] == "parquet":
            return pa.parquet.read_schema(path)
        with pa.OSFile(str(path)) as file:
            is_indexed = file.read(len(INDEXED)) == INDEXED
            file.seek(0)
            return (pa.ipc.open_file(file) if is_indexed else pa.ipc.open_stream(file)).schema


def _read_all_jsonl(source: Source) -> Iterator[JsonChunk]:
    for path in source.files:
        yield from _read_jsonl(path)


def _read_jsonl(path: Path) -> Iterator[JsonChunk]:
    with path.open("rb") as file:
        file.seek(len(BOM_UTF8) if file.read(len(BOM_UTF8)) == BOM_UTF8 else 0)
        lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
        while some := list(islice(lines, CHUNK)):
            yield JsonChunk([_read_line(path, number, line) for number, line in some])


def _read_line(path: Path, number: int, line: bytes) -> Row | str:
    try:
        row = msgspec.json.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return f"{path.name}, line {number} is not JSON: {error}"
    return row if isinstance(row, dict) else f"{path.name}, line {number} is not a JSON object"


def _infer_schema(source: Source, columns: Sequence[str] | None) -> pa.Schema:
    pa = import_arrow()
    schema = pa.schema([])
    for chunk in _read_all_jsonl(source):
        for name in chunk.list_names() if columns is None else columns:
            with _arrow_errors(f"column {name!r}"):
                found = pa.schema([(name, pa.array(chunk.read(name)).type)])
                schema = pa.unify_schemas([schema, found], promote_options="permissive")
    return schema


@contextmanager
def _arrow_errors(what: str) -> Iterator[None]:
    """Turn pyarrow's errors into a TableError about a file or a column."""
    pa = import_arrow()
    try:
        yield
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise TableError(f"{what}: {' '.join(str(error).split())}") from None
