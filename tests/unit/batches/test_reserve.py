from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from toka_async.batches.reserve import SIZE, Reserve


def test_it_is_given_and_made_again(tmp_path: Path) -> None:
    path = tmp_path / "reserve"
    reserve = Reserve(path)
    assert path.stat().st_size == SIZE
    reserve.give()
    assert path.stat().st_size == 0
    reserve.refill()
    assert path.stat().st_size == SIZE


def test_it_is_as_large_as_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite

    def short(fd: int, data: bytes, offset: int) -> int:
        if offset >= 8192:
            raise OSError(errno.ENOSPC, "no room")
        return write(fd, data, offset)

    path = tmp_path / "reserve"
    monkeypatch.setattr(os, "pwrite", short)
    reserve = Reserve(path)
    assert path.stat().st_size == 8192
    monkeypatch.undo()
    reserve.refill()
    assert path.stat().st_size == SIZE
