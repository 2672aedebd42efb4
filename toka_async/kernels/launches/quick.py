"""Launches Triton's kernels with less work of the host.

Triton compiles a kernel anew for each type, alignment and some values of its arguments. To find what it compiled, it
writes all of these as text for each launch. Here a tuple finds it, which differs wherever that text does. Triton's
settings (`triton.knobs`) are not in the tuple, so they must stay as they were at a kernel's first launch. A compiled
kernel is launched as in Triton's tutorial on the fused softmax.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from triton import JITFunction
from triton.runtime import driver

_ALIGNMENT = 16  # Triton compiles anew for addresses and integers that are a multiple
_INT32, _INT64 = 1 << 31, 1 << 63  # the first integers that do not fit these types


def launch_quickly(kernel: Any) -> Any:
    """Decorates a kernel of Triton whose launches give all arguments by position but the constants, which come last.

    A launch returns the compiled kernel. A kernel that Triton's interpreter runs is returned as it is.
    """
    return QuickKernel(kernel) if isinstance(kernel, JITFunction) else kernel


class QuickKernel:
    """A kernel and what was compiled of it. kernel: Triton's."""

    __slots__ = ("_compiled", "kernel")

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._compiled: dict[object, tuple[Any, list[object]]] = {}  # and the constants that follow the arguments

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> Any:
        key = (driver.active.get_current_device(), *map(_describe, arguments), *constants.items())
        found = self._compiled.get(key)
        if found is None:
            return self._find(key, grid, arguments, constants)
        compiled, values = found
        compiled[(*grid, 1, 1)[:3]](*arguments, *values)
        return compiled

    def _find(self, key: object, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> Any:
        """Has Triton launch the kernel, which it compiles if need be, and keeps what it launched."""
        params = self.kernel.params
        assert [param.is_constexpr for param in params] == [i >= len(arguments) for i in range(len(params))]
        values = [constants[param.name] for param in params[len(arguments) :]]
        compiled = self.kernel[grid](*arguments, **constants)
        self._compiled[key] = compiled, values
        return compiled


def _describe(argument: Any) -> object:
    """Describes what of an argument Triton compiles anew for, and maybe more."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % _ALIGNMENT == 0
    if isinstance(argument, int):  # or a bool
        is_small = -_INT32 <= argument < _INT32
        return type(argument), argument == 1, argument % _ALIGNMENT == 0, is_small, argument < _INT64
    if argument is None or isinstance(argument, float):
        return type(argument)
    # A descriptor of Triton, or of its Gluon, which has a layout as well.
    return type(argument), argument.base.dtype, *argument.block_shape, getattr(argument, "layout", None)
