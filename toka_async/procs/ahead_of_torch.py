"""Begins in threads, before torch is loaded, what a GPU needs and takes tenths of a second without Python's lock.

Loads no torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from threading import Thread
from typing import Any


def begin_ahead() -> None:
    """Starts the driver, and hashes Triton, if there are any. What fails is done again where it is needed.

    The driver looks at all GPUs, and takes no memory of one. Triton's cache names kernels by a hash of Triton itself,
    which has 400 MB; it is kept, but not until it is there: every thread that loads a first kernel would compute it.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return  # there is no GPU
    tasks: list[Callable[[], Any]] = [partial(driver.cuInit, 0)]
    with suppress(ImportError):
        from triton.runtime.cache import triton_key

        tasks.append(triton_key)
    for task in tasks:
        Thread(target=_try, args=(task,), name="ahead", daemon=True).start()


def _try(task: Callable[[], Any]) -> None:
    with suppress(Exception):
        task()
