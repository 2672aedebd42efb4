from __future__ import annotations

import json
from pathlib import Path

import pytest

from toka_async.tables.source import TableError, find_source


def make(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def names_of(folder: Path, split: str = "") -> list[str]:
    return [str(path.relative_to(folder)) for path in find_source(folder, split).files]


def save(folder: Path, *files: str) -> None:
    """As `Dataset.save_to_disk`."""
    make(folder, *files)
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": name} for name in files], "_fingerprint": "f", "_split": None})
    )


def test_a_file(tmp_path: Path) -> None:
    make(tmp_path, "a.parquet", "b.ndjson")
    assert find_source(tmp_path / "a.parquet").form == "parquet"
    assert find_source(tmp_path / "b.ndjson").form == "jsonl"


@pytest.mark.parametrize(
    ("name", "split", "message"),
    [
        ("nothing", "", "no such file or folder"),
        ("a.csv", "", "ends with"),
        ("a.parquet", "train", "only a folder has splits"),
        ("empty", "", "no .parquet"),
        ("mixed", "", r"several kinds \(jsonl, parquet\)"),
        ("splits", "", "has the splits test, train: choose one"),
        ("splits", "dev", "--split dev: .* has the splits test, train"),
        ("plain", "train", "--split train: .* has no splits"),
        ("saved", "train", "without splits"),
        ("broken", "", "is not what save_to_disk writes"),
    ],
)
def test_what_cannot_be_read(tmp_path: Path, name: str, split: str, message: str) -> None:
    make(
        tmp_path, "a.csv", "a.parquet", "mixed/a.parquet", "mixed/b.jsonl", "plain/part-0.parquet", "broken/state.json"
    )
    make(tmp_path, "splits/train-00000-of-00001.parquet", "splits/test-00000-of-00001.parquet")
    (tmp_path / "empty").mkdir()
    save(tmp_path / "saved", "data-00000-of-00001.arrow")
    with pytest.raises(TableError, match=message):
        find_source(tmp_path / name, split)


def test_files_of_a_folder_in_the_order_of_their_names(tmp_path: Path) -> None:
    make(tmp_path, "part-1.parquet", "part-0.parquet", ".cache/part-2.parquet", "README.md")
    assert names_of(tmp_path) == ["part-0.parquet", "part-1.parquet"]


def test_the_splits_of_a_data_set_of_the_hub(tmp_path: Path) -> None:
    make(tmp_path, "data/train-00001-of-00002.parquet", "data/train-00000-of-00002.parquet")
    assert len(names_of(tmp_path)) == 2  # the only split
    make(tmp_path, "data/test-00000-of-00001.parquet", "dev/a.parquet", "validation.parquet")
    assert names_of(tmp_path, "train") == ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]
    assert names_of(tmp_path, "dev") == ["dev/a.parquet"]
    assert names_of(tmp_path, "validation") == ["validation.parquet"]


def test_a_saved_data_set_has_the_order_of_its_state(tmp_path: Path) -> None:
    save(tmp_path, "data-00001-of-00002.arrow", "data-00000-of-00002.arrow")
    assert find_source(tmp_path).form == "arrow"
    assert names_of(tmp_path) == ["data-00001-of-00002.arrow", "data-00000-of-00002.arrow"]


def test_the_splits_of_a_saved_data_set(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for split in ("train", "test"):
        save(tmp_path / split, "data-00000-of-00001.arrow")
    assert names_of(tmp_path, "test") == ["test/data-00000-of-00001.arrow"]
    with pytest.raises(TableError, match="has the splits train, test"):
        find_source(tmp_path)


def test_changed_files_are_described_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("{}\n")
    before = find_source(path).describe()
    assert find_source(path).describe() == before
    path.write_text("{}\n{}\n")
    assert find_source(path).describe() != before
