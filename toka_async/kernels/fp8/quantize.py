"""Quantizes activations to 8-bit floats (E4M3) as they are made: of a norm, of a gate, or as they are.

A scale belongs to a token, or, where the weight is scaled by block, to a group of `BLOCK` inputs of a token. Values
times scale are the activations, the largest of which becomes the largest number of the type. Bound by memory: every
value is read once and written once, in a byte. Tokens of a group lie side by side, and all have memory for a multiple
of `ROW_MULTIPLE` rows, as cuBLASLt reads them.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from toka_async.kernels.activation import NAMES, activate
from toka_async.kernels.launches.pdl import can_follow, follow
from toka_async.kernels.launches.quick import launch_quickly
from toka_async.kernels.launches.sizes import divide_up, round_to_power
from toka_async.kernels.scaled_weight import BLOCK, Quantized

ROW_MULTIPLE: Final = 4  # rows of scales by groups, which cuBLASLt asks for
FP8: Final = torch.float8_e4m3fn
_CELLS = 2048  # values of a program that has no whole row to see


def quantize(x: Tensor, by_block: bool) -> Quantized:
    """Quantizes x [t, k]."""
    rows, _ = _run(x, x.shape[1], by_block)
    return rows


def quantize_gate(gate_up: Tensor, activation: str, by_block: bool) -> Quantized:
    """Quantizes the activation of the first half of gate_up [t, 2 * k] times the second half."""
    assert activation in NAMES, activation
    rows, _ = _run(gate_up, gate_up.shape[1] // 2, by_block, activation=activation)
    return rows


def quantize_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, by_block: bool
) -> tuple[Quantized, Tensor]:
    """Quantizes rms_norm(residual + x) * weight, and returns residual + x too, which is rounded before the norm."""
    assert residual is None or (residual.is_contiguous() and residual.shape == x.shape)
    return _run(x, x.shape[1], by_block, residual=residual, norm=(weight, eps))


def _run(
    x: Tensor,
    k: int,
    by_block: bool,
    activation: str = "",
    residual: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
) -> tuple[Quantized, Tensor]:
    assert x.is_contiguous()
    num_rows = len(x)
    padded = divide_up(num_rows, ROW_MULTIPLE) * ROW_MULTIPLE
    assert not by_block or k % BLOCK == 0
    values = torch.empty(padded, k, dtype=FP8, device=x.device)[:num_rows]
    scales = torch.empty(k // BLOCK if by_block else 1, padded, dtype=torch.float32, device=x.device)
    added = x if residual is None else torch.empty_like(x)
    width = BLOCK if by_block else round_to_power(k)
    groups = round_to_power(divide_up(k, width))
    if norm is None:
        groups = min(groups, max(1, _CELLS // width))
    rows = max(1, _CELLS // (groups * width)) if norm is not None else 1
    weight, eps = norm or (None, 0.0)
    # What is added may come from other ranks, so that a kernel of another stream is in front of this one.
    pdl = residual is None and can_follow(x)
    if num_rows:
        _quantize[(divide_up(num_rows, rows), divide_up(k, groups * width))](
            x,
            residual,
            weight,
            values,
            scales,
            added,
            num_rows,
            padded,
            eps,
            k=k,
            activation=activation,
            rows=rows,
            groups=groups,
            width=width,
            pdl=pdl,
            num_warps=min(16, max(4, groups * width // 1024)),
            launch_pdl=pdl,
        )
    return (values, scales.T[:num_rows]), added


@launch_quickly
@triton.jit(do_not_specialize=["num_rows", "padded"])
def _quantize(
    x_at,
    residual_at,
    weight_at,
    values_at,
    scales_at,
    added_at,
    num_rows,
    padded,
    eps,
    k: tl.constexpr,
    activation: tl.constexpr,
    rows: tl.constexpr,
    groups: tl.constexpr,
    width: tl.constexpr,
    pdl: tl.constexpr,
):
    """One program quantizes `groups` groups of `rows` rows; with a norm these are the whole rows."""
    follow(pdl)
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    group = tl.program_id(1) * groups + tl.arange(0, groups)
    column = group[:, None] * width + tl.arange(0, width)[None, :]
    is_row = row < num_rows
    within = is_row[:, None, None] & (column < k)[None, :, :]
    cells = row[:, None, None] * k + column[None, :, :]
    if activation != "":
        gate_at = x_at + cells + row[:, None, None] * k
        gate = tl.load(gate_at, mask=within, other=0.0).to(tl.float32)
        wide = activate(gate, tl.load(gate_at + k, mask=within, other=0.0).to(tl.float32), activation)
    else:
        x = tl.load(x_at + cells, mask=within, other=0.0)
        if residual_at is not None:
            x = (x.to(tl.float32) + tl.load(residual_at + cells, mask=within, other=0.0).to(tl.float32)).to(x.dtype)
            tl.store(added_at + cells, x, mask=within)
        wide = x.to(tl.float32)
        if weight_at is not None:
            factor = tl.rsqrt(tl.sum(tl.sum(wide * wide, 2), 1) / k + eps)
            weight = tl.load(weight_at + column, mask=column < k, other=0.0).to(tl.float32)
            wide = wide * factor[:, None, None] * weight[None, :, :]
    scale = tl.maximum(tl.max(tl.abs(wide), 2), 1e-10) / 448
    tl.store(values_at + cells, (wide / scale[:, :, None]).to(values_at.dtype.element_ty), mask=within)
    is_group = is_row[:, None] & (group * width < k)[None, :]
    tl.store(scales_at + group[None, :] * padded + row[:, None], scale, mask=is_group)
