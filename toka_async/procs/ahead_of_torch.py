"""Begins in threads, before torch is imported, what a GPU needs and takes long without Python's lock.

Imports no torch.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any


def begin_ahead() -> None:
    """Starts the driver, hashes Triton and loads torch's libraries, where there is a GPU.

    What fails is done again where it is needed. The driver looks at all GPUs, and takes no memory of one. Triton's
    cache names kernels by a hash of Triton itself, which has 400 MB; it is kept, but not until it is there: every
    thread that loads a first kernel would compute it.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return  # there is no GPU
    tasks: list[Callable[[], Any]] = [partial(driver.cuInit, 0), _load_torch]
    # An import waits until no other thread loads a library, and holds Python's lock meanwhile. So these, which have
    # libraries, are imported before the threads begin.
    with suppress(ImportError):
        import llguidance  # noqa: F401
    with suppress(ImportError):
        from triton.runtime.cache import triton_key

        tasks.append(triton_key)
    for task in tasks:
        Thread(target=_try, args=(task,), name="ahead", daemon=True).start()


def _load_torch() -> None:
    """Loads torch's libraries as its import does, by a call that releases Python's lock, which an import holds.

    The import finds libraries of CUDA by their paths after the first of these, because another version of one in
    LD_LIBRARY_PATH would be taken otherwise (pytorch#138460). Where that is set, only the first is loaded ahead.
    """
    torch = find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    folder = Path(torch.origin).parent / "lib"
    load = ctypes.CDLL(None).dlopen
    load.argtypes, load.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    is_loaded = load(bytes(folder / "libtorch_global_deps.so"), os.RTLD_GLOBAL | os.RTLD_NOW)
    if is_loaded and not os.environ.get("LD_LIBRARY_PATH"):
        load(bytes(folder / "libtorch.so"), os.RTLD_LOCAL | os.RTLD_NOW)


def _try(task: Callable[[], Any]) -> None:
    with suppress(Exception):
        task()
