from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from toka_async.batches.results import Answered, encode_line
from toka_async.tables.requests import RowRequests
from toka_async.tables.source import TableError, find_source
from toka_async.tables.table_job import TableJob, make_table_job
from toka_async.tables.write import TableFormat

NUM_ROWS = 2500


def make_rows(folder: Path) -> Path:
    path = folder / "in.parquet"
    prompts = [None if number % 100 == 7 else f"p{number}" for number in range(NUM_ROWS)]
    pq.write_table(pa.table({"prompt": prompts, "id": range(NUM_ROWS)}), path, row_group_size=400)
    return path


def make(
    source: Path, name: str = "out.parquet", *, column: str = "", keep: list[str] | None = None, **settings: Any
) -> TableJob:
    output = source.parent / name
    return make_table_job(find_source(source), output, RowRequests(column, **settings), TableFormat(()), keep)


def answer_all(job: TableJob) -> None:
    """As a run does: in another order, the refused lines in the file of errors."""
    answers: list[bytes] = []
    errors: list[bytes] = []
    for line in reversed(job.requests_path.read_bytes().splitlines()):
        asked = json.loads(line)
        row, prompt = int(asked["custom_id"]), asked["body"]["prompt"]
        if prompt is None:
            body: dict[str, Any] = {"error": {"message": "'prompt' is null"}}
        else:
            choice = {"index": 0, "text": f"after {prompt}", "finish_reason": "stop"}
            body = {"choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}
        status = 400 if prompt is None else 200
        data = encode_line("batch_b", row, 0, Answered(str(row), status, json.dumps(body).encode())).data
        (errors if prompt is None else answers).append(data)
    job.answers_path.write_bytes(b"".join(answers))
    job.errors_path.write_bytes(b"".join(errors))


@pytest.mark.parametrize("name", ["out.parquet", "out.jsonl"])
def test_every_row_has_an_answer_or_an_error_in_its_order(tmp_path: Path, name: str) -> None:
    job = make(make_rows(tmp_path), name, keep=["id"])
    assert job.write_requests() == NUM_ROWS
    answer_all(job)
    job.write_output(NUM_ROWS)
    if name == "out.parquet":
        rows = pq.read_table(job.output).to_pylist()
    else:
        rows = [json.loads(line) for line in job.output.read_text().splitlines()]
    assert [row["id"] for row in rows] == list(range(NUM_ROWS))
    bad = [row for row in rows if row["error"] is not None]
    assert [row["id"] for row in bad] == list(range(7, NUM_ROWS, 100))
    assert {row["error"] for row in bad} == {"column 'prompt': expected text, token ids or messages, got nothing"}
    assert all(row["generated_text"] == f"after p{row['id']}" for row in rows if row["error"] is None)


def test_a_run_continues_with_the_same_rows_and_options(tmp_path: Path) -> None:
    source = make_rows(tmp_path)
    assert make(source).write_requests() == NUM_ROWS
    before = make(source).requests_path.stat().st_mtime_ns
    assert make(source, keep=["id"]).write_requests() == NUM_ROWS
    assert make(source).requests_path.stat().st_mtime_ns == before
    with pytest.raises(TableError, match="other rows or other options"):
        make(source, n=2).write_requests()
    os.utime(source, ns=(1, 1))
    with pytest.raises(TableError, match="other rows or other options"):
        make(source).write_requests()


def test_requests_that_were_not_written_to_their_end_are_written_again(tmp_path: Path) -> None:
    job = make(make_rows(tmp_path))
    job.folder.mkdir()
    job.requests_path.write_bytes(b'{"custom_id"')
    assert job.write_requests() == NUM_ROWS
    assert len(job.requests_path.read_bytes().splitlines()) == NUM_ROWS


def test_the_output_is_written_again_when_there_are_newer_answers(tmp_path: Path) -> None:
    job = make(make_rows(tmp_path))
    job.write_requests()
    answer_all(job)
    assert not job.is_written()
    job.write_output(NUM_ROWS)
    assert job.is_written()
    newer = job.output.stat().st_mtime_ns + 1
    os.utime(job.answers_path, ns=(newer, newer))
    assert not job.is_written()


def test_the_output_is_written_again_for_other_columns(tmp_path: Path) -> None:
    source = make_rows(tmp_path)
    job = make(source)
    job.write_requests()
    answer_all(job)
    job.write_output(NUM_ROWS)
    other = make(source, keep=["id"])
    assert not other.is_written()
    other.write_output(NUM_ROWS)
    assert other.is_written()
    assert not job.is_written()


def test_an_interrupted_beginning_is_no_other_run(tmp_path: Path) -> None:
    job = make(make_rows(tmp_path))
    job.folder.mkdir()
    (job.folder / "facts.part").touch()
    assert job.write_requests() == NUM_ROWS


def test_files_of_others_stay(tmp_path: Path) -> None:
    source = make_rows(tmp_path)
    (tmp_path / "out.parquet").touch()
    with pytest.raises(TableError, match="exists already"):
        make(source).write_requests()
    (tmp_path / "out.jsonl.progress").mkdir()
    (tmp_path / "out.jsonl.progress" / "batches.sqlite").touch()
    with pytest.raises(TableError, match="folder of another run"):
        make(source, "out.jsonl").write_requests()


def test_what_cannot_begin(tmp_path: Path) -> None:
    source = make_rows(tmp_path)
    with pytest.raises(TableError, match="no column 'x' to keep"):
        make(source, keep=["x"])
    with pytest.raises(TableError, match="no column 'question'"):
        make(source, column="question")
    with pytest.raises(TableError, match="no such folder"):
        make(source, "no/out.parquet")
    (tmp_path / "folder.parquet").mkdir()
    with pytest.raises(TableError, match="is a folder"):
        make(source, "folder.parquet")
    empty = tmp_path / "empty.parquet"
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), empty)
    with pytest.raises(TableError, match="no rows"):
        make(empty).write_requests()


def test_damaged_facts(tmp_path: Path) -> None:
    job = make(make_rows(tmp_path))
    job.write_requests()
    (job.folder / "facts.json").write_text("{")
    with pytest.raises(TableError, match="is damaged"):
        job.write_requests()


def test_types_that_parquet_cannot_have_are_known_before_the_run(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "p", "x": 1}\n{"prompt": "p", "x": "text"}\n')
    with pytest.raises(TableError, match="column 'x'"):
        make(path)
    make(path, keep=["prompt"])
    make(path, "out.jsonl")
