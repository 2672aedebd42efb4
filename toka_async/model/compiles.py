"""Counts the kernels that Triton compiles: once a rank is warm the count must not move."""

from __future__ import annotations

from typing import Any


class CompileCounter:
    """Counts from the first call of `watch` on."""

    def __init__(self) -> None:
        self._num_kernels = 0

    def watch(self) -> None:
        """Begins to count. Replaces any hook that was there. Needs Triton."""
        from triton import knobs

        knobs.runtime.jit_post_compile_hook = self._add

    def count(self) -> int:
        """Returns the kernels that were built, or loaded from Triton's cache, since the last reset."""
        return self._num_kernels

    def reset(self) -> None:
        self._num_kernels = 0

    def _add(self, **_: Any) -> None:
        self._num_kernels += 1
