import os
from pathlib import Path

from toka_async.startup.memory import read_available_memory

GIB = 1 << 30


def _machine(folder: Path, available_kib: int) -> Path:
    proc = folder / "proc"
    proc.mkdir()
    (proc / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemFree: 1 kB\nMemAvailable:   {available_kib} kB\n")
    return proc


def test_of_the_machine(tmp_path: Path) -> None:
    assert read_available_memory(_machine(tmp_path, 3 << 20), tmp_path) == 3 * GIB


def test_a_container_has_less(tmp_path: Path) -> None:
    proc = _machine(tmp_path, 3 << 20)
    (tmp_path / "memory.max").write_text(f"{2 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{GIB // 2}\n")
    assert read_available_memory(proc, tmp_path) == 3 * GIB // 2


def test_an_older_container_has_less(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text(str(GIB))
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text(str(2 * GIB))
    assert read_available_memory(_machine(tmp_path, 3 << 20), tmp_path) == 0


def test_a_container_without_a_limit(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("5\n")
    assert read_available_memory(_machine(tmp_path, 1), tmp_path) == 1024


def test_without_proc(tmp_path: Path) -> None:
    assert read_available_memory(tmp_path / "none", tmp_path) == os.sysconf("SC_PAGE_SIZE") * os.sysconf(
        "SC_PHYS_PAGES"
    )
