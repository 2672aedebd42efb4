"""Casts between what the model computes with and what the cache stores: the same numbers, or E4M3 (arXiv:2209.05433).

A stored number times its scale is the key or value. Kernels fold scales into the softmax's scale and the result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_LARGEST = tl.constexpr(torch.finfo(torch.float8_e4m3fn).max)
_LARGEST_HALF = tl.constexpr(torch.finfo(torch.float16).max)


@triton.constexpr_function
def choose_operand(computed: tl.dtype, stored: tl.dtype) -> tl.dtype:
    """Chooses the dtype of products of queries with what is stored.

    E4M3 is widened to float16, which is exact: a GPU does it in a quarter of the instructions that bfloat16 takes.
    """
    return tl.float16 if stored == tl.float8e4nv and computed == tl.bfloat16 else computed


@triton.jit
def to_operand(x, dtype: tl.constexpr):
    """Casts queries to the dtype of products; what is beyond float16 saturates."""
    if x.dtype != dtype:
        x = tl.clamp(x.to(tl.float32), -_LARGEST_HALF, _LARGEST_HALF)
    return x.to(dtype)


@triton.jit
def to_stored(x, dtype: tl.constexpr, factor):
    """Casts keys or values to what is stored: to E4M3 times the factor, saturated."""
    if dtype == tl.float8e4nv:
        x = tl.clamp(x.to(tl.float32) * factor, -_LARGEST, _LARGEST)
    return x.to(dtype)
