"""Launches Triton's kernels with less work of the host.

For each launch, Triton binds the arguments to the kernel's signature and writes what it compiles apart for as text, to
find the kernel that it compiled for such arguments. This takes longer than the launch itself. Here a tuple finds the
kernel, which tells apart at least as much as long as the process runs: Triton's settings for debugging (`triton.knobs`)
must not change after a kernel's first launch. Triton's tutorial of the fused softmax launches compiled kernels like
this.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from triton import JITFunction
from triton.runtime import driver

_ALIGNMENT = 16  # of addresses and integers: Triton compiles apart for what is a multiple
_INT32, _INT64 = 1 << 31, 1 << 63  # from where on integers are of the next larger type


def launch_quickly(kernel: Any) -> Any:
    """Decorates a kernel that the host launches with constants by name and all else by position, in this order.

    A launch returns the compiled kernel. A kernel that Triton's interpreter runs stays as it is.
    """
    return QuickKernel(kernel) if isinstance(kernel, JITFunction) else kernel


class QuickKernel:
    """Keeps what was compiled of a kernel. kernel: itself, as Triton made it."""

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
        """Launches as Triton does, which compiles what it has not compiled."""
        params = self.kernel.params
        assert [param.is_constexpr for param in params] == [i >= len(arguments) for i in range(len(params))]
        values = [constants[param.name] for param in params[len(arguments) :]]
        compiled = self.kernel[grid](*arguments, **constants)
        self._compiled[key] = compiled, values
        return compiled


def _describe(argument: Any) -> object:
    """Tells apart what Triton compiles apart for."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % _ALIGNMENT == 0
    if isinstance(argument, int):  # or a bool
        is_small = -_INT32 <= argument < _INT32
        return type(argument), argument == 1, argument % _ALIGNMENT == 0, is_small, argument < _INT64
    if argument is None or isinstance(argument, float):
        return type(argument)
    # A descriptor of Triton, or of its Gluon, which has a layout as well.
    return type(argument), argument.base.dtype, *argument.block_shape, getattr(argument, "layout", None)
