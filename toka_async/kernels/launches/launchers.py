"""Lets several threads load the launchers of Triton's kernels.

Triton 3.6 compiles a launcher for each signature, and loads it as a module from a file of its own, but under one name
for all. When a file is loaded again, CPython writes its functions into whichever module has that name now, and returns
that module (`import_find_extension`). So a thread that reads `launch` may get what another thread has loaded since, and
the kernel is launched by the launcher of another from then on. Later versions have one launcher for all kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from types import ModuleType

from triton.runtime import build


@contextmanager
def keep_launchers_apart() -> Iterator[None]:
    """Loads one module at a time within, and gives each caller a copy that later loads do not change."""
    load, lock = build._load_module_from_path, Lock()

    def load_apart(name: str, path: str) -> ModuleType:
        with lock:
            module = load(name, path)
            apart = ModuleType(name)
            apart.__dict__.update(module.__dict__)
            return apart

    build._load_module_from_path = load_apart
    try:
        yield
    finally:
        build._load_module_from_path = load
