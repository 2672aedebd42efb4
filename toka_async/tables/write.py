"""Writes rows with their answers as Parquet or JSONL. A file has its name only when it is whole."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import msgspec

from toka_async.tables.answers import RowAnswer
from toka_async.tables.chunks import Chunk, import_arrow, read_schema
from toka_async.tables.source import SUFFIXES, Source, TableError

if TYPE_CHECKING:
    import pyarrow as pa

GROUP_BYTES = 64 << 20  # of a row group of Parquet, before its compression


class TableFormat(msgspec.Struct, frozen=True):
    """The columns of the output: the input's, and those of the answers.

    keep: columns of the input. answer: the column of the generated text, a list of texts for n > 1. response: the
    column of the whole response as JSON; empty for none.
    """

    keep: tuple[str, ...]
    answer: str = "generated_text"
    response: str = ""
    n: int = 1

    @property
    def added(self) -> list[str]:
        names = [self.answer, "finish_reason", "prompt_tokens", "completion_tokens", "error"]
        return [*names, self.response] if self.response else names

    def check(self) -> None:
        """Raises TableError if two columns have one name."""
        names = [*self.keep, *self.added]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise TableError(
                f"two columns of the output would be {twice[0]!r}: name another with --answer-column or "
                "--response-column, or name the columns to keep with --keep"
            )

    def make_columns(self, answers: Sequence[RowAnswer]) -> dict[str, list[Any]]:
        """The added columns; None in the places of what a row without an answer lacks."""
        values: list[list[Any]] = [
            [self._pick(each.texts) for each in answers],
            [self._pick(each.finish_reasons) for each in answers],
            [None if each.error else each.prompt_tokens for each in answers],
            [None if each.error else each.completion_tokens for each in answers],
            [each.error or None for each in answers],
            [each.response or None for each in answers],
        ]
        return dict(zip(self.added, values, strict=False))

    def _pick(self, samples: list[str]) -> list[str] | str | None:
        """All samples, or the only one; None for no samples."""
        if not samples:
            return None
        return samples if self.n > 1 else samples[0]


class TableWriter(Protocol):
    def write(self, chunk: Chunk, answers: Sequence[RowAnswer]) -> None:
        """Add rows. Raises TableError if they cannot be written."""
        ...


@contextmanager
def open_writer(path: Path, source: Source, table: TableFormat) -> Iterator[TableWriter]:
    """Write a file beside `path`, which replaces it at the end, and is removed after an error.

    Raises:
        TableError: pyarrow is missing, or the types of the input's columns contradict each other.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as file:
            if is_parquet(path):
                with _open_parquet(file, source, table) as writer:
                    yield writer
            else:
                yield JsonWriter(file, table)
            file.flush()
            os.fsync(file.fileno())
        part.rename(path)
    finally:
        part.unlink(missing_ok=True)


def is_parquet(path: Path) -> bool:
    """Tells whether a file of that name is written as Parquet, and not as JSONL. Raises TableError for neither."""
    form = SUFFIXES.get(path.suffix)
    if form not in ("parquet", "jsonl"):
        raise TableError(f"--output {path}: rows are written to a file that ends with .parquet or .jsonl")
    return form == "parquet"


@dataclass(frozen=True, slots=True)
class JsonWriter:
    file: BinaryIO
    table: TableFormat

    def write(self, chunk: Chunk, answers: Sequence[RowAnswer]) -> None:
        columns = self.table.make_columns(answers)
        for place, row in enumerate(chunk.read_rows(self.table.keep)):
            added = {name: values[place] for name, values in columns.items()}
            self.file.write(msgspec.json.encode(row | added, enc_hook=str) + b"\n")


@dataclass(slots=True)
class ParquetWriter:
    """kept: the types of the input's columns that are kept. Rows wait until they are a row group."""

    file: pa.parquet.ParquetWriter
    table: TableFormat
    kept: pa.Schema
    schema: pa.Schema
    _waiting: list[pa.RecordBatch] = field(default_factory=list)
    _num_bytes: int = 0

    def write(self, chunk: Chunk, answers: Sequence[RowAnswer]) -> None:
        pa = import_arrow()
        columns = self.table.make_columns(answers)
        added = [pa.array(columns[name], type=self.schema.field(name).type) for name in columns]
        batch = pa.RecordBatch.from_arrays([*chunk.convert(self.kept), *added], schema=self.schema)
        self._waiting.append(batch)
        self._num_bytes += batch.get_total_buffer_size()
        if self._num_bytes >= GROUP_BYTES:
            self.write_group()

    def write_group(self) -> None:
        pa = import_arrow()
        if self._waiting:
            self.file.write_table(pa.Table.from_batches(self._waiting), row_group_size=1 << 30)
        self._waiting, self._num_bytes = [], 0


@contextmanager
def _open_parquet(file: BinaryIO, source: Source, table: TableFormat) -> Iterator[ParquetWriter]:
    pa = import_arrow()
    kept = read_schema(source, table.keep)
    text, number = pa.string(), pa.int64()
    of_samples = pa.list_(text) if table.n > 1 else text
    types = dict(zip(table.added, [of_samples, of_samples, number, number, text, text], strict=False))
    schema = pa.schema([*kept, *types.items()])
    with pa.parquet.ParquetWriter(file, schema) as writer:
        rows = ParquetWriter(writer, table, kept, schema)
        yield rows
        rows.write_group()
