from __future__ import annotations

import builtins
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from toka_async.tables.chunks import CHUNK, list_columns, read_chunks, read_schema
from toka_async.tables.source import Source, TableError, find_source

ROWS = [{"id": number, "prompt": f"p{number}", "extra": {"a": [number]}} for number in range(CHUNK + 10)]


def write(folder: Path, form: str) -> Source:
    table = pa.Table.from_pylist(ROWS)
    path = folder / f"rows.{form}"
    match form:
        case "parquet":
            pq.write_table(table, path, row_group_size=100)
        case "arrow":
            with pa.ipc.new_stream(path, table.schema) as stream:
                stream.write_table(table)
        case "jsonl":
            path.write_text("\n".join(map(json.dumps, ROWS)))
    return find_source(path)


@pytest.mark.parametrize("form", ["parquet", "arrow", "jsonl"])
def test_rows_come_in_pieces(tmp_path: Path, form: str) -> None:
    source = write(tmp_path, form)
    chunks = list(read_chunks(source))
    assert max(len(chunk) for chunk in chunks) <= CHUNK
    assert [row for chunk in chunks for row in chunk.read_rows(["extra", "id"])] == [
        {"extra": row["extra"], "id": row["id"]} for row in ROWS
    ]
    assert [prompt for chunk in chunks for prompt in chunk.read("prompt")] == [row["prompt"] for row in ROWS]
    assert chunks[0].read_rows([]) == [{}] * len(chunks[0])
    assert list_columns(source) == ["id", "prompt", "extra"]


def test_an_arrow_file_with_an_index(tmp_path: Path) -> None:
    table = pa.table({"prompt": ["a", "b"]})
    path = tmp_path / "rows.arrow"
    with pa.ipc.new_file(path, table.schema) as file:
        file.write_table(table)
    (chunk,) = read_chunks(find_source(path))
    assert chunk.read("prompt") == ["a", "b"]
    assert list_columns(find_source(path)) == ["prompt"]


def test_a_byte_order_mark_is_no_part_of_a_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n', "utf-8-sig")
    (chunk,) = read_chunks(find_source(path))
    assert chunk.read("prompt") == ["a"]


@pytest.mark.parametrize(
    ("text", "part"), [("", "no rows"), ("\n \n", "no rows"), ("[1]\nx", "line 1 is not a JSON object")]
)
def test_a_file_without_rows_says_so(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(TableError, match=part):
        list_columns(find_source(path))


def test_lines_that_are_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\n{"prompt": "a"}\nnot json\n[1]\n{"other": 1}\n"\xff"\n')
    (chunk,) = read_chunks(find_source(path))
    assert chunk.read("prompt") == ["a", None, None, None, None]
    faults = chunk.find_faults()
    assert sorted(faults) == [1, 2, 4]
    assert "line 3 is not JSON" in faults[1]
    assert faults[2] == "rows.jsonl, line 4 is not a JSON object"
    assert chunk.read_rows(["prompt"]) == [{"prompt": "a"}, {}, {}, {}, {}]


def test_types_of_json_are_those_that_all_rows_fit(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows: list[dict[str, Any]] = [{"a": None, "b": 1}] * CHUNK + [{"a": {"x": 1}, "b": 1.5}, {"a": {"y": "t"}, "c": []}]
    path.write_text("\n".join(map(json.dumps, rows)))
    source = find_source(path)
    schema = read_schema(source)
    assert schema.names == ["a", "b", "c"]
    assert schema.field("b").type == pa.float64()
    last = list(read_chunks(source))[-1]
    assert last.convert(schema)[0].to_pylist() == [{"x": 1, "y": None}, {"x": None, "y": "t"}]


def test_types_of_json_that_contradict(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"a": value}) for value in [*range(CHUNK), "text"]))
    with pytest.raises(TableError, match="column 'a'"):
        read_schema(find_source(path))


def test_columns_keep_their_types(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    when = pa.array([datetime(2026, 1, 1, tzinfo=UTC)], pa.timestamp("ns", "UTC"))
    table = pa.table({"when": when, "f": pa.array([1.5], pa.float16())})
    pq.write_table(table, path)
    source = find_source(path)
    (chunk,) = read_chunks(source)
    assert chunk.convert(read_schema(source, ["f", "when"])) == [table["f"].chunk(0), table["when"].chunk(0)]


def test_a_broken_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"no parquet")
    with pytest.raises(TableError, match=r"rows\.parquet"):
        list(read_chunks(find_source(path)))
    with pytest.raises(TableError, match=r"rows\.parquet"):
        list_columns(find_source(path))


def test_files_with_other_columns(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"question": ["a"]}), tmp_path / "1.parquet")
    _, second = read_chunks(find_source(tmp_path))
    with pytest.raises(TableError, match="prompt"):
        second.read("prompt")
    with pytest.raises(TableError, match=r"1\.parquet: its column 'prompt' is not of the type"):
        read_schema(find_source(tmp_path), ["prompt"])


def test_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path, "parquet")
    find = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "pyarrow":
            raise ImportError(name)
        return find(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(TableError, match=r"pip install 'toka-async\[data\]'"):
        list(read_chunks(source))
    assert next(read_chunks(write_json(tmp_path))).read("prompt") == ["a"]


def write_json(folder: Path) -> Source:
    path = folder / "some.jsonl"
    path.write_text('{"prompt": "a"}')
    return find_source(path)
