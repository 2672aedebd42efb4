"""Runs Triton kernels on the CPU where there is no GPU; to be called before a module with kernels is first imported."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

import numpy as np
import torch

_ROUNDED = {"bf16": (torch.bfloat16, torch.uint16), "fp8e4nv": (torch.float8_e4m3fn, torch.uint8)}


def interpret_kernels() -> None:
    """Chooses Triton's interpreter if there is no GPU, and mends what Triton 3.6 gets wrong in it."""
    if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return
    os.environ["TRITON_INTERPRET"] = "1"
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    builder = interpreter.InterpreterBuilder
    patch_tensor, dot, cast = interpreter._patch_lang_tensor, builder.create_dot, builder.cast_impl
    convert = builder.create_fp_to_fp

    def patched(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        # Its scalars are arrays of one element, which NumPy 2.4 no longer takes for an int.
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, _widened(a), _widened(b), *rest)

    def cast_impl(self: Any, source: Any, dtype: Any) -> Any:
        return cast(self, source, dtype) if _is_exact(source, dtype) else _round(source, dtype)

    def create_fp_to_fp(self: Any, source: Any, dtype: Any, rounding: Any) -> Any:
        return convert(self, source, dtype, rounding) if _is_exact(source, dtype) else _round(source, dtype)

    interpreter._patch_lang_tensor = patched
    builder.create_dot, builder.cast_impl, builder.create_fp_to_fp = create_dot, cast_impl, create_fp_to_fp


def _is_exact(source: Any, dtype: Any) -> bool:
    return str(source.dtype.scalar) != "fp32" or str(dtype.scalar) not in _ROUNDED


def _round(source: Any, dtype: Any) -> Any:
    """Rounds float32 to the nearest, as a GPU does: the interpreter cuts off bfloat16, and small numbers of E4M3."""
    rounded, bits = _ROUNDED[str(dtype.scalar)]
    return type(source)(torch.from_numpy(np.array(source.data)).to(rounded).view(bits).numpy(), dtype.scalar)


def _widened(handle: Any) -> Any:
    """A bfloat16 operand as float32: the interpreter keeps its bits as uint16, and would multiply those."""
    if str(handle.dtype) != "bf16":
        return handle
    widened = (handle.data.astype(np.uint32) << 16).view(np.float32)
    return type(handle)(widened, importlib.import_module("triton.language").float32)
