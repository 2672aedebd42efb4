from __future__ import annotations

import os
from pathlib import Path

import pytest

from toka_async.batches.disk import StorageError
from toka_async.batches.folder import StoreFolder
from toka_async.batches.store import Store


def opened(folder: Path) -> Store:
    return Store(folder, lambda: 1000)


def test_a_strangers_folder_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / f"file-{'a' * 24}").touch()
    (tmp_path / "uploads").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(StorageError, match=r"is not empty, and no batches\.sqlite in it shows"):
        opened(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["lost+found", "lock"])
def test_a_folder_that_is_as_good_as_empty_is_taken(tmp_path: Path, name: str) -> None:
    """A new file system's, and one whose first start was killed."""
    (tmp_path / name).mkdir() if name != "lock" else (tmp_path / name).touch()
    opened(tmp_path).close()
    opened(tmp_path).close()


@pytest.mark.parametrize("name", ["files", "uploads"])
def test_a_linked_folder_is_refused(tmp_path: Path, name: str) -> None:
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    opened(data).close()
    (data / name).rename(elsewhere)
    (elsewhere / f"file-{'a' * 24}").touch()
    (data / name).symlink_to(elsewhere)
    with pytest.raises(StorageError, match=f"{name} is a symbolic link"):
        opened(data)
    assert len(list(elsewhere.iterdir())) == 1


@pytest.mark.parametrize("name", ["lock", "reserve"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, name: str) -> None:
    opened(tmp_path).close()
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    if name == "lock":
        with pytest.raises(StorageError, match="lock is no file"):
            opened(tmp_path)
    else:
        opened(tmp_path).close()


def test_discarding_leaves_what_is_somebody_elses(tmp_path: Path) -> None:
    for folder in ("empty", "full"):
        opened(tmp_path / folder).close()
    (tmp_path / "full" / "files" / "notes").touch()
    for folder in ("empty", "full"):
        StoreFolder(tmp_path / folder).discard()
    assert not (tmp_path / "empty").exists()
    assert (tmp_path / "full" / "files" / "notes").exists()
    assert not (tmp_path / "full" / "batches.sqlite").exists()
