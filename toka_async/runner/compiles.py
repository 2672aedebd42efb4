"""Counts what is compiled: kernels and graphs of torch.compile. After warm-up the count must not move.

Knows the compilers' own counters; knows no models.
"""

from __future__ import annotations

from typing import Any

from triton import knobs

from toka_async.model.compiled import num_compiles


class CompileCounter:
    """Counts from its making on; takes the place of any hook that was there."""

    def __init__(self) -> None:
        self._kernels = 0
        self._graphs = num_compiles()
        knobs.runtime.jit_post_compile_hook = self._compiled

    def count(self) -> int:
        """Kernels of Triton, built or loaded from its cache, and graphs of torch.compile."""
        return self._kernels + num_compiles() - self._graphs

    def _compiled(self, **_: Any) -> None:
        self._kernels += 1
