"""Counts what is compiled, and what should have been: after warm-up the count must not move.

Knows the compilers' own counters; knows no models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton import knobs

from toka_async.model.compiled import num_compiles


class CompileCounter:
    """Counts from its making on; takes the place of any hook that was there.

    count_eager: calls of a compiled function that ran uncompiled, because no graph fitted.
    """

    def __init__(self, count_eager: Callable[[], int] = int) -> None:
        self._kernels = 0
        self._count_eager = count_eager
        self._graphs = num_compiles()
        knobs.runtime.jit_post_compile_hook = self._compiled

    def count(self) -> int:
        """Kernels of Triton, built or loaded from its cache, graphs of torch.compile, and calls that found none."""
        return self._kernels + num_compiles() - self._graphs + self._count_eager()

    def _compiled(self, **_: Any) -> None:
        self._kernels += 1
