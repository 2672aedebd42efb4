from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def socket_folders(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where servers make their socket folders: with a path short enough, and nobody else's."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)
