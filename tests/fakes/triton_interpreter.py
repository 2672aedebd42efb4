"""Runs Triton kernels on the CPU where there is no GPU; to be called before a module with kernels is first imported."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

import numpy as np
import torch


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
        if (str(source.dtype.scalar), str(dtype.scalar)) != ("fp32", "bf16"):
            return cast(self, source, dtype)
        # A GPU rounds to the nearest; the interpreter cuts off.
        bits = torch.from_numpy(np.array(source.data)).bfloat16().view(torch.int16).numpy().view(np.uint16)
        return type(source)(bits, dtype.scalar)

    def create_fp_to_fp(self: Any, source: Any, dtype: Any, rounding: Any) -> Any:
        if str(dtype.scalar) != "fp8e4nv":
            return convert(self, source, dtype, rounding)
        # A GPU rounds to the nearest and saturates; the interpreter loses an exponent where rounding carries.
        wide = torch.from_numpy(np.array(_widened(source).data, np.float32)).clamp(-448, 448)
        return type(source)(wide.to(torch.float8_e4m3fn).view(torch.uint8).numpy(), dtype.scalar)

    interpreter._patch_lang_tensor = patched
    builder.create_dot, builder.cast_impl, builder.create_fp_to_fp = create_dot, cast_impl, create_fp_to_fp


def _widened(handle: Any) -> Any:
    """A bfloat16 operand as float32: the interpreter keeps its bits as uint16, and would multiply those."""
    if str(handle.dtype) != "bf16":
        return handle
    widened = (handle.data.astype(np.uint32) << 16).view(np.float32)
    return type(handle)(widened, importlib.import_module("triton.language").float32)
