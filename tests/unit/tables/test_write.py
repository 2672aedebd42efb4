from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from toka_async.tables import write
from toka_async.tables.answers import RowAnswer
from toka_async.tables.chunks import read_chunks
from toka_async.tables.source import Source, TableError, find_source
from toka_async.tables.write import TableFormat, is_parquet, open_writer

GOOD = RowAnswer(["a", "b"], ["stop", "length"], 3, 5, response="{}")
BAD = RowAnswer([], [], error="wrong")


def make_source(folder: Path, num_rows: int = 2) -> Source:
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps({"id": number, "prompt": "p"}) + "\n" for number in range(num_rows)))
    return find_source(path)


def write_all(source: Source, output: Path, table: TableFormat, answers: list[RowAnswer]) -> None:
    with open_writer(output, source, table) as writer:
        for start, chunk in enumerate(read_chunks(source)):
            writer.write(chunk, answers[start * 1024 : start * 1024 + len(chunk)])


def test_samples_are_lists(tmp_path: Path) -> None:
    expected = [
        {
            "id": 0,
            "generated_text": ["a", "b"],
            "finish_reason": ["stop", "length"],
            "prompt_tokens": 3,
            "completion_tokens": 5,
            "error": None,
            "r": "{}",
        },
        {"id": 1, **dict.fromkeys(("generated_text", "finish_reason", "prompt_tokens", "completion_tokens"))}
        | {"error": "wrong", "r": None},
    ]
    table = TableFormat(("id",), response="r", n=2)
    source = make_source(tmp_path)
    write_all(source, tmp_path / "out.parquet", table, [GOOD, BAD])
    write_all(source, tmp_path / "out.jsonl", table, [GOOD, BAD])
    assert pq.read_table(tmp_path / "out.parquet").to_pylist() == expected
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()] == expected


def test_a_sample_is_a_text(tmp_path: Path) -> None:
    write_all(make_source(tmp_path), tmp_path / "out.parquet", TableFormat((), answer="a"), [GOOD, BAD])
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.column_names == ["a", "finish_reason", "prompt_tokens", "completion_tokens", "error"]
    assert table["a"].to_pylist() == ["a", None]


def test_row_groups_have_many_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_source(tmp_path, 5000)
    write_all(source, tmp_path / "one.parquet", TableFormat(("id",)), [GOOD] * 5000)
    monkeypatch.setattr(write, "GROUP_BYTES", 1)
    write_all(source, tmp_path / "many.parquet", TableFormat(("id",)), [GOOD] * 5000)
    one, many = (pq.ParquetFile(tmp_path / name) for name in ("one.parquet", "many.parquet"))
    assert (one.num_row_groups, many.num_row_groups) == (1, 5)
    assert one.read() == many.read()


def test_a_file_that_is_not_whole_has_no_name(tmp_path: Path) -> None:
    source, output = make_source(tmp_path), tmp_path / "out.jsonl"
    output.write_text("of an earlier run")
    with pytest.raises(IndexError):
        write_all(source, output, TableFormat(()), [GOOD])  # and none for the second row
    assert output.read_text() == "of an earlier run"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_names_of_columns() -> None:
    TableFormat(("id",)).check()
    with pytest.raises(TableError, match="two columns of the output would be 'error'"):
        TableFormat(("id", "error")).check()


def test_names_of_files() -> None:
    assert is_parquet(Path("a.parquet"))
    assert not is_parquet(Path("a.jsonl"))
    for name in ("a.csv", "a.arrow", "a"):
        with pytest.raises(TableError, match=r"ends with \.parquet or \.jsonl"):
            is_parquet(Path(name))
