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
    patch_tensor, dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patched(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        # Its scalars are arrays of one element, which NumPy 2.4 no longer takes for an int.
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, _widened(a), _widened(b), *rest)

    interpreter._patch_lang_tensor = patched
    interpreter.InterpreterBuilder.create_dot = create_dot


def _widened(handle: Any) -> Any:
    """A bfloat16 operand as float32: the interpreter keeps its bits as uint16, and would multiply those."""
    if str(handle.dtype) != "bf16":
        return handle
    widened = (handle.data.astype(np.uint32) << 16).view(np.float32)
    return type(handle)(widened, importlib.import_module("triton.language").float32)
