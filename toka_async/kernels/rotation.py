"""Computes the rotation of a step's tokens in one kernel, which `append` applies in every layer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from toka_async.kernels.launches.quick import launch_quickly
from toka_async.kernels.launches.sizes import divide_up, round_to_power

_ANGLES = 512  # of a program


def compute_rotation(
    positions: Tensor, inverse_frequencies: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Equals `attention.rope.compute_rotation`, which says what the tensors are."""
    (num_tokens,), (half,) = positions.shape, inverse_frequencies.shape
    cos = torch.empty(num_tokens, 1, 2 * half, dtype=dtype, device=positions.device)
    sin = torch.empty_like(cos)
    half_pad = round_to_power(half)
    tokens = max(1, _ANGLES // half_pad)
    if num_tokens:
        _rotation[(divide_up(num_tokens, tokens),)](
            positions,
            inverse_frequencies,
            cos,
            sin,
            num_tokens,
            scale,
            half=half,
            half_pad=half_pad,
            tokens=tokens,
            num_warps=4,
        )
    return cos, sin


@launch_quickly
@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["positions"])
def _rotation(
    positions,
    inverse_frequencies,
    cos_at,
    sin_at,
    num_tokens,
    scale,
    half: tl.constexpr,
    half_pad: tl.constexpr,
    tokens: tl.constexpr,
):
    """One program computes the angles of `tokens` tokens in float32."""
    token = tl.program_id(0).to(tl.int64) * tokens + tl.arange(0, tokens)
    column = tl.arange(0, half_pad)
    inside = (token < num_tokens)[:, None] & (column < half)[None, :]
    position = tl.load(positions + token, mask=token < num_tokens, other=0).to(tl.float32)
    frequency = tl.load(inverse_frequencies + column, mask=column < half, other=0.0)
    angle = position[:, None] * frequency[None, :]
    cos, sin = tl.cos(angle) * scale, tl.sin(angle) * scale
    place = token[:, None] * (2 * half) + column[None, :]
    dtype = cos_at.dtype.element_ty
    tl.store(cos_at + place, cos.to(dtype), mask=inside)
    tl.store(cos_at + place + half, cos.to(dtype), mask=inside)
    tl.store(sin_at + place, (-sin).to(dtype), mask=inside)
    tl.store(sin_at + place + half, sin.to(dtype), mask=inside)
