"""Computes with which share the expert of all tokens counts for each of them. Knows no matrices."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from toka_async.kernels.launches.pdl import can_follow, follow
from toka_async.kernels.launches.quick import launch_quickly
from toka_async.kernels.launches.sizes import divide_up, round_to_power

_CELLS = 4096  # values of a program
_BLOCK = 2048  # values of a token at once


def open_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Returns the sigmoid of each token's product with the gate, in float32: [t, hidden] and [1, hidden] to [t]."""
    num_tokens, hidden = x.shape
    assert x.is_contiguous()
    assert gate.shape == (1, hidden)
    shares = torch.empty(num_tokens, dtype=torch.float32, device=x.device)
    block, pdl = min(_BLOCK, round_to_power(hidden)), can_follow(x)
    rows = max(1, _CELLS // block)
    _open_gate[(divide_up(num_tokens, rows),)](
        x, gate, shares, num_tokens, hidden=hidden, rows=rows, block=block, pdl=pdl, num_warps=4, launch_pdl=pdl
    )
    return shares


@launch_quickly
@triton.jit(do_not_specialize=["num_tokens"])
def _open_gate(
    x_at,
    gate_at,
    shares_at,
    num_tokens,
    hidden: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    pdl: tl.constexpr,
):
    """One program opens the gate for `rows` tokens."""
    follow(pdl)
    token = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    is_token = token < num_tokens
    total = tl.zeros([rows, block], tl.float32)
    for begin in range(0, hidden, block):
        column = begin + tl.arange(0, block)
        within = is_token[:, None] & (column < hidden)[None, :]
        x = tl.load(x_at + token[:, None] * hidden + column[None, :], mask=within, other=0.0).to(tl.float32)
        gate = tl.load(gate_at + column, mask=column < hidden, other=0.0).to(tl.float32)
        total += x * gate[None, :]
    tl.store(shares_at + token, tl.sigmoid(tl.sum(total, 1)), mask=is_token)
