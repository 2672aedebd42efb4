from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from toka_async.socket_folder import MARKER, remove_folder, remove_unlocked, socket_folder


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files; its path is short enough for sockets."""
    folder = tmp_path_factory.mktemp("t")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(folder))
    monkeypatch.setattr("toka_async.socket_folder.LONGEST_BASE", 200)
    return folder


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


def left_over(place: Path) -> Path:
    """The folder of a start whose processes were killed."""
    folder = place / "toka-left"
    folder.mkdir()
    bind(folder / "server")
    (folder / "group-0-0").write_text("ranks")
    (folder / MARKER).touch()
    return folder


def test_a_folder_lives_as_long_as_its_start(place: Path) -> None:
    with socket_folder() as folder:
        assert folder.parent == place
        assert folder.stat().st_mode & 0o777 == 0o700
        bind(folder / "scheduler-0")
        with socket_folder() as other:
            assert other != folder
        assert {each.name for each in folder.iterdir()} == {MARKER, "scheduler-0"}
    assert not list(place.iterdir())


@pytest.mark.usefixtures("place")
def test_a_socket_that_goes_meanwhile_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = os.listdir
    monkeypatch.setattr(os, "listdir", lambda fd: [*listed(fd), "gone"])
    with socket_folder() as folder:
        bind(folder / "server")
    assert not folder.exists()


def test_what_killed_processes_left_is_removed(place: Path) -> None:
    left_over(place)
    with socket_folder() as folder:
        assert list(place.iterdir()) == [folder]


@pytest.mark.usefixtures("place")
def test_a_child_that_outlives_its_parent_removes_the_folder() -> None:
    """The parent's lock is of no account to it."""
    with socket_folder() as folder:
        remove_folder(folder)
        assert not folder.exists()


def a_file(folder: Path) -> None:
    (folder / "notes").write_text("mine")


def a_folder(folder: Path) -> None:
    (folder / "files").mkdir()


def a_link(folder: Path) -> None:
    (folder / "group-1-0").symlink_to("/etc/hostname")


def no_marker(folder: Path) -> None:
    (folder / MARKER).unlink()


def a_linked_marker(folder: Path) -> None:
    (folder / MARKER).unlink()
    (folder / MARKER).symlink_to("group-0-0")


def a_pipe_as_marker(folder: Path) -> None:
    (folder / MARKER).unlink()
    os.mkfifo(folder / MARKER)


def a_folder_as_marker(folder: Path) -> None:
    (folder / MARKER).unlink()
    (folder / MARKER).mkdir()


@pytest.mark.parametrize(
    "change", [a_file, a_folder, a_link, no_marker, a_linked_marker, a_pipe_as_marker, a_folder_as_marker]
)
def test_a_folder_that_is_anything_else_stays_whole(place: Path, change: Callable[[Path], None]) -> None:
    folder = left_over(place)
    change(folder)
    before = sorted(each.name for each in folder.iterdir())
    with socket_folder():
        pass
    remove_folder(folder)
    assert sorted(each.name for each in folder.iterdir()) == before


def test_a_link_to_a_folder_is_not_followed(place: Path, tmp_path: Path) -> None:
    folder = left_over(tmp_path)
    (place / "toka-link").symlink_to(folder)
    remove_unlocked(place / "toka-link")
    assert (folder / MARKER).exists()


def test_neither_data_nor_pipes_nor_strangers_files_are_in_the_way(place: Path) -> None:
    """A folder of files and batches has a lock too, and a progress folder one that nobody holds."""
    (place / "toka-data" / "files").mkdir(parents=True)
    (place / "toka-data" / "lock").touch()
    (place / "toka-pipe").mkdir()
    os.mkfifo(place / "toka-pipe" / "lock")
    (place / "toka-file").touch()
    before = sorted(place.rglob("*"))
    with socket_folder():
        pass
    assert sorted(place.rglob("*")) == before
