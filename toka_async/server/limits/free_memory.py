"""Returns free memory to the system: the C library keeps what was freed, for the process to use again."""

from __future__ import annotations

import ctypes

LARGE = 64 << 20  # bytes in use at once, after which it is worth a try


def release_free_memory() -> None:
    """Takes some milliseconds, without the interpreter's lock. Does nothing where there is no glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
