"""Finds the files of a data set: one file, a folder of files, or what Hugging Face's `save_to_disk` wrote."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

import msgspec

Form: TypeAlias = Literal["parquet", "arrow", "jsonl"]
T = TypeVar("T")

SUFFIXES: dict[str, Form] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
}
SHARD = re.compile(r"(.+)-\d+-of-\d+")  # a split's file in Hugging Face's layouts, such as train-00000-of-00002
SPLITS = ("train", "test", "validation", "dev")  # names that are a split's also without a number


class TableError(Exception):
    """A data set cannot be read or written; the message is one line for the user."""


class _SavedFile(msgspec.Struct, frozen=True):
    filename: str


class _SavedDataset(msgspec.Struct, frozen=True):
    """state.json of a saved Dataset."""

    data_files: list[_SavedFile] = msgspec.field(name="_data_files")


class _SavedSplits(msgspec.Struct, frozen=True):
    """dataset_dict.json of a saved DatasetDict."""

    splits: list[str]


@dataclass(frozen=True, slots=True)
class Source:
    """The files of a data set, in the order of their rows."""

    form: Form
    files: tuple[Path, ...]

    def describe(self) -> list[tuple[str, int, int]]:
        """Each file's path, size in bytes and time of change in ns: the rows are the same while these are."""
        states = [(str(path), path.stat()) for path in self.files]
        return [(path, state.st_size, state.st_mtime_ns) for path, state in states]


def find_source(path: Path, split: str = "") -> Source:
    """Find the files of a data set.

    Args:
        split: of a folder with several; empty for one that has no splits, or only one.

    Raises:
        TableError: there is no such data set or split, or it is none that can be read.
    """
    path = path.absolute()
    if path.is_dir():
        return _find_in_folder(path, split)
    if not path.is_file():
        raise TableError(f"{path}: no such file or folder")
    if split:
        raise TableError(f"--split {split}: {path} is a file, and only a folder has splits")
    form = SUFFIXES.get(path.suffix)
    if form is None:
        raise TableError(f"{path}: a file of rows ends with {', '.join(SUFFIXES)}")
    return Source(form, (path,))


def _find_in_folder(folder: Path, split: str) -> Source:
    if (listed := folder / "dataset_dict.json").is_file():
        splits = _read_json(listed, _SavedSplits).splits
        return _find_in_folder(folder / _choose_split(folder, split, splits), "")
    if (state := folder / "state.json").is_file():
        if split:
            raise TableError(f"--split {split}: {folder} holds one data set without splits")
        return Source("arrow", tuple(folder / each.filename for each in _read_json(state, _SavedDataset).data_files))
    return _find_loose(folder, split)


def _find_loose(folder: Path, split: str) -> Source:
    """The files of a folder that only their names describe, as in a data set of the hub. Hidden ones are left out."""
    found = [
        each
        for each in sorted(folder.rglob("*"))
        if each.suffix in SUFFIXES and not any(part.startswith(".") for part in each.relative_to(folder).parts)
    ]
    forms = sorted({SUFFIXES[each.suffix] for each in found})
    if len(forms) != 1:
        what = f"files of several kinds ({', '.join(forms)})" if forms else f"no {', '.join(SUFFIXES)} files"
        raise TableError(f"{folder} has {what}: name a folder with files of one kind, or a file")
    splits = {each: _read_split(each.relative_to(folder)) for each in found}
    names = sorted(set(splits.values()) - {""})
    if split or len(names) > 1:
        chosen = _choose_split(folder, split, names)
        found = [each for each in found if splits[each] == chosen]
    return Source(forms[0], tuple(found))


def _read_split(name: Path) -> str:
    """The split that a file's relative path names: `train` for data/train-00000-of-00002.parquet; "" for none."""
    if shard := SHARD.fullmatch(name.stem):
        return shard[1]
    return next((part for part in (name.stem, *reversed(name.parts[:-1])) if part in SPLITS), "")


def _choose_split(folder: Path, split: str, splits: list[str]) -> str:
    if split in splits:
        return split
    if not split and len(splits) == 1:
        return splits[0]
    names = f"{folder} has the splits {', '.join(splits)}" if splits else f"{folder} has no splits"
    raise TableError(f"--split {split}: {names}" if split else f"{names}: choose one with --split")


def _read_json(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except msgspec.MsgspecError as error:
        raise TableError(f"{path} is not what save_to_disk writes: {error}") from None
