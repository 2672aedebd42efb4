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

    interpreter._patch_lang_tensor = patched
    builder.create_dot, builder.cast_impl = create_dot, cast_impl


def _widened(handle: Any) -> Any:
    """A bfloat16 operand as float32: the interpreter keeps its bits as uint16, and would multiply those."""
    if str(handle.dtype) != "bf16":
        return handle
    widened = (handle.data.astype(np.uint32) << 16).view(np.float32)
    return type(handle)(widened, importlib.import_module("triton.language").float32)
