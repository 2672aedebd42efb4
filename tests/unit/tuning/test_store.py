from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from toka_async.attention.choice import ChoiceTable, MeasuredShape, choose_always
from toka_async.tuning import store as tuning_cache
from toka_async.tuning.store import TuningCache, describe_gpu, find_folder

PLATFORM = {"gpu": "large", "packages": {"torch": "2"}}
FACTS = {"shape": [64, 32], "sizes": [1, 2, 4], "dtype": "bfloat16"}
TABLE = ChoiceTable(
    (MeasuredShape(1, 2, "own"),), (MeasuredShape(3, 4, "library"),), (MeasuredShape(5, 6, "own"),), ((7, 8),)
)


def test_another_process_finds_what_was_kept(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"
    TuningCache(folder, PLATFORM).keep("attention", FACTS, TABLE)
    again = TuningCache(folder, dict(reversed(PLATFORM.items())))
    assert again.find("attention", dict(reversed(FACTS.items())), ChoiceTable) == TABLE
    assert (again.num_found, again.num_asked) == (1, 1)
    again.keep("attention", FACTS, choose_always("own"))
    assert TuningCache(folder, PLATFORM).find("attention", FACTS, ChoiceTable) == choose_always("own")
    (file,) = folder.iterdir()
    assert (file.name[:10], file.suffix) == ("attention-", ".json")


@pytest.mark.parametrize(
    ("platform", "what", "facts", "kind"),
    [
        (PLATFORM | {"gpu": "small"}, "attention", FACTS, ChoiceTable),
        (PLATFORM, "graphs", FACTS, ChoiceTable),
        (PLATFORM, "attention", FACTS | {"sizes": [1, 2]}, ChoiceTable),
        (PLATFORM, "attention", FACTS, list[int]),
    ],
)
def test_who_asks_for_something_else_finds_nothing(
    tmp_path: Path, platform: dict[str, object], what: str, facts: dict[str, object], kind: type[Any]
) -> None:
    TuningCache(tmp_path, PLATFORM).keep("attention", FACTS, TABLE)
    cache = TuningCache(tmp_path, platform)
    assert cache.find(what, facts, kind) is None
    assert (cache.num_found, cache.num_asked) == (0, 1)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"[", b"null", b"[1]", b"\xff", b'[{"what":"another"},["3"]]', b'[{},["\xff"]]'),
        pytest.param(b"[" * 100_000, id="deep"),
        None,
    ],
)
def test_damaged_files_are_measured_anew(tmp_path: Path, content: bytes | None) -> None:
    cache = TuningCache(tmp_path, PLATFORM)
    cache.keep("graphs", FACTS, ["1", "2"])
    (file,) = tmp_path.iterdir()
    file.write_bytes(b" " * (1 << 20) + file.read_bytes() if content is None else content)  # None: far too large
    assert cache.find("graphs", FACTS, list[str]) is None
    cache.keep("graphs", FACTS, ["1", "2"])
    assert cache.find("graphs", FACTS, list[str]) == ["1", "2"]


def test_without_a_folder_nothing_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    cache = TuningCache(None, PLATFORM)
    cache.keep("graphs", FACTS, [1, 2])
    assert cache.find("graphs", FACTS, list[int]) is None
    assert not cache.keeps
    caplog.set_level(logging.INFO)
    cache.report()
    assert not caplog.messages


def test_a_folder_that_cannot_be_written_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    cache = TuningCache(tmp_path / "file" / "folder", PLATFORM)
    for _ in range(2):
        cache.keep("graphs", FACTS, [1, 2])
        assert cache.find("graphs", FACTS, list[int]) is None
    assert caplog.messages == [
        f"tuning.dir={tmp_path}/file/folder: Not a directory; "
        "every start measures anew what is not there until it can be written"
    ]
    cache = TuningCache(Path("no\0path"), PLATFORM)
    cache.keep("graphs", FACTS, [1, 2])
    assert cache.find("graphs", FACTS, list[int]) is None
    assert len(caplog.messages) == 2


def test_in_a_folder_that_cannot_be_written_answers_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may come with an image, and a write is tried once."""
    TuningCache(tmp_path, PLATFORM).keep("graphs", FACTS, [1, 2])
    tried: list[Path] = []

    def refuse(path: Path, _: bytes) -> None:
        tried.append(path)
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(tuning_cache, "_write", refuse)
    cache = TuningCache(tmp_path, PLATFORM)
    assert TuningCache(tmp_path, PLATFORM).keeps
    for _ in range(2):
        cache.keep("attention", FACTS, TABLE)
    assert len(tried) == 1
    assert not cache.keeps
    assert cache.find("graphs", FACTS, list[int]) == [1, 2]


def test_others_may_read_what_the_umask_lets_them(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        TuningCache(tmp_path, PLATFORM).keep("graphs", FACTS, [1, 2])
    finally:
        os.umask(before)
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o640


def test_a_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is left of one that could not be finished."""

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    TuningCache(tmp_path, PLATFORM).keep("graphs", FACTS, [1, 2])
    assert not list(tmp_path.iterdir())


def test_what_was_found_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    cache = TuningCache(tmp_path, PLATFORM)
    cache.report()
    cache.keep("graphs", FACTS, [1, 2])
    cache.find("graphs", FACTS, list[int])
    cache.find("attention", FACTS, ChoiceTable)
    cache.report()
    assert caplog.messages == [f"1 of 2 measurements found in {tmp_path}"]


def test_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert find_folder("") is None
    assert find_folder("auto") == Path("/home/me/.cache/toka-async/tuning")
    assert find_folder("~/measured") == Path("/home/me/measured")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert find_folder("auto") == Path("/caches/toka-async/tuning")
    monkeypatch.setenv("XDG_CACHE_HOME", "caches")
    assert find_folder("auto") == Path("/home/me/.cache/toka-async/tuning")


def test_without_a_home_nothing_is_kept(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """As of a container's user that has no name."""

    def homeless(_: str) -> str:
        raise KeyError

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name in ("getpwuid", "getpwnam"):
        monkeypatch.setattr(f"pwd.{name}", homeless)
    for tuning_dir in ("auto", "~/measured", "~another/measured"):
        assert find_folder(tuning_dir) is None
        assert caplog.messages[-1].startswith(f"tuning.dir={tuning_dir}: ")
    assert len(caplog.messages) == 3


def test_the_platform_is_the_chip_the_libraries_and_our_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Properties:
        name = "large"
        multi_processor_count = 7

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties())
    package = tmp_path / "package"
    (package / "runner").mkdir(parents=True)
    (package / "kernel.py").write_text("fast = 1")
    monkeypatch.setattr(tuning_cache, "__file__", str(package / "runner" / "tuning_cache.py"))
    first = describe_gpu(torch.device("cuda"))
    assert msgspec.json.decode(msgspec.json.encode(first)) == first
    assert first == describe_gpu(torch.device("cuda"))
    assert (first["gpu"], first["multiprocessors"], first["torch"]) == ("large", 7, torch.__version__)

    def changed() -> set[str]:
        second = describe_gpu(torch.device("cuda"))
        return {name for name in first if first[name] != second[name]}

    (package / "kernel.py").write_text("fast = 2")
    assert changed() == {"sources"}
    (package / "kernel.py").write_text("fast = 1")
    assert changed() == set()
    (package / "kernel.py").rename(package / "kernels.py")
    monkeypatch.setattr(torch.version, "cuda", "99.9")
    monkeypatch.setattr("importlib.metadata.version", lambda name: f"99 of {name}")
    assert changed() == {"sources", "cuda", "packages"}
