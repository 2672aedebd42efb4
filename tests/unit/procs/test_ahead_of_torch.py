from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
from triton.runtime import cache

from tests.drivers.until import SECONDS
from toka_async.procs.ahead_of_torch import begin_ahead


def test_the_driver_and_tritons_hash_are_begun_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: SimpleQueue[tuple[str, str]] = SimpleQueue()

    def note(what: str) -> int:
        begun.put((what, threading.current_thread().name))
        raise OSError("what fails here is done again later")

    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(cuInit=lambda _: note("driver")))
    monkeypatch.setattr(cache, "triton_key", lambda: note("hash"))
    begin_ahead()
    assert {begun.get(timeout=SECONDS) for _ in range(2)} == {("driver", "ahead"), ("hash", "ahead")}


def test_nothing_is_begun_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(cache, "triton_key", lambda: pytest.fail("there is no GPU"))
    begin_ahead()


def test_torch_is_not_loaded() -> None:
    program = """
import ctypes, sys
from types import SimpleNamespace
from toka_async.procs.ahead_of_torch import begin_ahead
ctypes.CDLL = lambda _: SimpleNamespace(cuInit=int)
begin_ahead()
print("triton" in sys.modules, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


@pytest.mark.parametrize("path", ["", "/opt/other"])
def test_torchs_libraries_are_loaded_before_it_is_imported(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not all of them where the system may find other versions."""
    monkeypatch.setenv("LD_LIBRARY_PATH", path)
    program = """
import sys
from pathlib import Path
from toka_async.procs.ahead_of_torch import _load_torch
_load_torch()
maps = Path("/proc/self/maps").read_text()
print("libtorch_global_deps.so" in maps, "libtorch_cpu.so" in maps, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", str(not path), "False"]
