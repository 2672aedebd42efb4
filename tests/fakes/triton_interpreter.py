"""Runs Triton kernels on the CPU where there is no GPU; to be called before a module with kernels is first imported."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import os
import types
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
    language: Any = importlib.import_module("triton.language")
    builder = interpreter.InterpreterBuilder
    patch_tensor, cast = interpreter._patch_lang_tensor, builder.cast_impl
    convert = builder.create_fp_to_fp

    def patched(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        # Its scalars are arrays of one element, which NumPy 2.4 no longer takes for an int.
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def create_dot(self: Any, a: Any, b: Any, total: Any, *rest: Any) -> Any:  # noqa: ARG001 - precisions
        # A library for matrices adds up in another order at another place of a tile, on some processors.
        product = np.einsum("...ij,...jk->...ik", _widen(a), _widen(b), dtype=total.data.dtype, casting="unsafe")
        return type(total)(product + total.data, total.dtype.scalar)

    def cast_impl(self: Any, source: Any, dtype: Any) -> Any:
        return cast(self, source, dtype) if _is_exact(source, dtype) else _round(source, dtype)

    def create_fp_to_fp(self: Any, source: Any, dtype: Any, rounding: Any) -> Any:
        return convert(self, source, dtype, rounding) if _is_exact(source, dtype) else _round(source, dtype)

    interpreter._patch_lang_tensor = patched
    builder.create_dot, builder.cast_impl, builder.create_fp_to_fp = create_dot, cast_impl, create_fp_to_fp
    _keep_types(language.core, interpreter)
    # For good: at each launch, and at each call of a function, it takes longer than most kernels.
    interpreter._patch_lang(types.SimpleNamespace(__globals__={"tl": language, "core": language.core}))
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()  # noqa: ARG005 - it restores nothing


def _keep_types(core: Any, interpreter: Any) -> None:
    """Makes each type and each shape once. Triton makes them for every value, which takes longer than computing it.

    A type's name says all of it.
    """
    make_dtype = interpreter._get_np_dtype
    blocks: dict[tuple[Any, ...], Any] = {}
    dtypes: dict[str, np.dtype[Any]] = {}

    @functools.cache
    def make_shape(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = make_shape(tuple(type.shape.values) if type.is_block() else ())

    def with_element_ty(self: Any, element: Any) -> Any:
        sizes = self.shape.values
        if (key := (element.name, *sizes)) not in blocks:
            blocks[key] = core.block_type(element, sizes)
        return blocks[key]

    def get_np_dtype(dtype: Any) -> np.dtype[Any]:
        if dtype.name not in dtypes:
            dtypes[dtype.name] = make_dtype(dtype)
        return dtypes[dtype.name]

    core.tensor.__init__ = init_tensor
    core.block_type.with_element_ty = with_element_ty
    core.block_type.to_ir = lambda self, builder: self  # noqa: ARG005 - the interpreter's types are Triton's own
    interpreter._get_np_dtype = get_np_dtype


def _is_exact(source: Any, dtype: Any) -> bool:
    return str(source.dtype.scalar) != "fp32" or str(dtype.scalar) not in _ROUNDED


def _round(source: Any, dtype: Any) -> Any:
    """Rounds float32 to the nearest, as a GPU does: the interpreter cuts off bfloat16, and small numbers of E4M3."""
    rounded, bits = _ROUNDED[str(dtype.scalar)]
    return type(source)(torch.from_numpy(np.array(source.data)).to(rounded).view(bits).numpy(), dtype.scalar)


def _widen(handle: Any) -> np.ndarray[Any, Any]:
    """Returns an operand's values, in float32 where the interpreter keeps bits of which NumPy has no type."""
    if (stored := _ROUNDED.get(str(handle.dtype.scalar))) is None:
        values: np.ndarray[Any, Any] = handle.data
        return values
    widened: np.ndarray[Any, Any] = torch.from_numpy(np.array(handle.data)).view(stored[0]).float().numpy()
    return widened
