"""Keeps the garbage collector away from what modules make when they are loaded."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hold_collections() -> Iterator[None]:
    """Collects nothing while modules are loaded within, and never looks at what is there at the end.

    It lives as long as the process, and with torch has hundreds of thousands of objects: collections would go through
    them several times while they are made, and at each of the start's later ones.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
