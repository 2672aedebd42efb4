"""A run over the rows of a data set: writes their requests to a file, and its results beside the rows.

Between the two, the requests are a file of OpenAI's batches, which any run of such files answers. All files stay in one
folder until the user removes it, so each part continues after an interruption.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from toka_async.tables.answers import RowAnswer, RowAnswers, open_answers
from toka_async.tables.chunks import Chunk, list_columns, read_chunks, read_schema
from toka_async.tables.requests import RowRequests, choose_column, find_fault
from toka_async.tables.source import Source, TableError
from toka_async.tables.write import TableFormat, is_parquet, open_writer

WRITE_BYTES = 1 << 20


class TableFacts(msgspec.Struct, frozen=True):
    """What the file of requests was made of. A run continues only where it is the same."""

    files: list[tuple[str, int, int]]
    requests: RowRequests
    num_rows: int = 0


@dataclass(frozen=True, slots=True)
class TableJob:
    """folder: of the requests, the results and what continuing them needs."""

    source: Source
    requests: RowRequests
    output: Path
    format: TableFormat
    folder: Path

    @property
    def requests_path(self) -> Path:
        return self.folder / "requests.jsonl"

    @property
    def answers_path(self) -> Path:
        return self.folder / "answers.jsonl"

    @property
    def errors_path(self) -> Path:
        return self.folder / "errors.jsonl"

    def write_requests(self) -> int:
        """Write the requests, unless an earlier run did; returns the number of rows.

        Raises:
            TableError: the data set cannot be read, is empty, or is not what an earlier run began with.
        """
        facts = TableFacts(self.source.describe(), self.requests)
        if (before := self._read_facts()) is not None:
            if msgspec.structs.replace(before, num_rows=0) != facts:
                raise TableError(
                    f"{self.folder} was begun with other rows or other options: repeat them, or remove the folder and "
                    f"{self.output.name} to start over"
                )
            return before.num_rows
        if self.output.exists():
            raise TableError(f"{self.output} exists already, and no run has begun it: remove it or name another")
        self.folder.mkdir(exist_ok=True)
        written = self.folder / "facts.part"
        if any(each not in (self.requests_path, written) for each in self.folder.iterdir()):
            raise TableError(f"{self.folder} is the folder of another run: remove it or name another --output")
        num_rows = self._write_lines()
        if not num_rows:
            raise TableError("the data set has no rows")
        written.write_bytes(msgspec.json.encode(msgspec.structs.replace(facts, num_rows=num_rows)))
        written.rename(self._facts_path)
        return num_rows

    def is_written(self) -> bool:
        """Tells whether the output has the newest results, and the columns that are wanted now."""
        if not (self.output.is_file() and self._format_path.is_file()):
            return False
        if self._format_path.read_bytes() != msgspec.json.encode(self.format):
            return False
        results = [each.stat().st_mtime_ns for each in (self.answers_path, self.errors_path) if each.is_file()]
        return self.output.stat().st_mtime_ns >= max(results, default=0)

    def write_output(self, num_rows: int) -> None:
        """Write every row with its answer or its error, in the order of the rows. Raises TableError."""
        index = self.folder / "index"
        with (
            open_answers(self.answers_path, self.errors_path, index, num_rows) as answers,
            open_writer(self.output, self.source, self.format) as writer,
        ):
            for start, chunk in self._read([*self.format.keep, self.requests.column]):
                writer.write(chunk, self._collect(answers, start, chunk))
        self._format_path.write_bytes(msgspec.json.encode(self.format))

    @property
    def _facts_path(self) -> Path:
        return self.folder / "facts.json"

    @property
    def _format_path(self) -> Path:
        """The columns that the output has."""
        return self.folder / "columns.json"

    def _read_facts(self) -> TableFacts | None:
        try:
            return msgspec.json.decode(self._facts_path.read_bytes(), type=TableFacts)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            raise TableError(f"{self._facts_path} is damaged: {error}") from None

    def _write_lines(self) -> int:
        num_rows = 0
        with self.requests_path.open("wb", buffering=WRITE_BYTES) as file:
            for start, chunk in self._read([self.requests.column]):
                for number, prompt in enumerate(chunk.read(self.requests.column), start):
                    file.write(self.requests.make_line(number, prompt))
                num_rows = start + len(chunk)
            file.flush()
            os.fsync(file.fileno())
        return num_rows

    def _read(self, columns: Sequence[str]) -> Iterator[tuple[int, Chunk]]:
        """The rows in pieces, each with the number of its first row."""
        start = 0
        for chunk in read_chunks(self.source, list(dict.fromkeys(columns))):
            yield start, chunk
            start += len(chunk)

    def _collect(self, answers: RowAnswers, start: int, chunk: Chunk) -> list[RowAnswer]:
        """The answers of a piece. A row that could not be asked says what is wrong with it, not with its request."""
        faults = chunk.find_faults()
        column = self.requests.column
        found = []
        for place, prompt in enumerate(chunk.read(column)):
            answer = answers.read(start + place)
            if answer.error:
                fault = faults.get(place) or find_fault(column, prompt)
                answer = replace(answer, error=fault or answer.error)
            found.append(answer)
        return found


def make_table_job(
    source: Source, output: Path, requests: RowRequests, table: TableFormat, keep: Sequence[str] | None
) -> TableJob:
    """Check what can be checked before a run.

    Args:
        requests: with an empty `column` where the usual one is meant.
        keep: the input's columns that the output has; None: all.

    Raises:
        TableError: a column is missing or has several types, the output cannot be written, or pyarrow is missing.
    """
    output = output.absolute()
    if not output.parent.is_dir():
        raise TableError(f"{output.parent}: no such folder")
    if output.is_dir():
        raise TableError(f"--output {output} is a folder")
    columns = list_columns(source)
    if missing := [name for name in keep or () if name not in columns]:
        raise TableError(f"no column {missing[0]!r} to keep: the data set has {', '.join(columns)}")
    requests = msgspec.structs.replace(requests, column=choose_column(columns, requests.column))
    table = msgspec.structs.replace(table, keep=tuple(columns if keep is None else keep), n=requests.n)
    table.check()
    if is_parquet(output):
        read_schema(source, table.keep)  # what cannot be written is better known before the run than after it
    return TableJob(source, requests, output, table, output.with_name(f"{output.name}.progress"))
