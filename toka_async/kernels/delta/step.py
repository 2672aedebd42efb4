"""One step of the gated delta rule for rows that decode, each with its state, at a cost that no context changes.

A program advances some columns of a head's state. With few rows it has all of them, and norms and gates the output in
the same pass; with many, a pass of its own is faster, since less of a program's time goes by without reads and writes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from toka_async.kernels.delta.layer import DeltaShape, DeltaWeights
from toka_async.kernels.delta.norm import norm_gated, norm_outputs
from toka_async.kernels.launches.pdl import can_follow, follow
from toka_async.kernels.launches.quick import launch_quickly
from toka_async.kernels.launches.sizes import divide_up, round_to_power

# As measured on an H200 with heads of 128: up to so many rows a whole head is as fast as columns of it.
_FEW_ROWS = 16
_COLUMNS = 64


def step_states(
    convolved: Tensor,
    z: Tensor,
    gates: Tensor,
    states: Tensor,
    slots: Tensor,
    weights: DeltaWeights,
    shape: DeltaShape,
    padding: int,
    output: Tensor,
) -> None:
    """Advances the states of rows by one token; writes the gated outputs [n, values].

    convolved: [n, channels], see `convolution.convolve`. z: [n, values]. gates: [n, 2 * value heads]. states:
    [slots, value heads, key_dim, value_dim], computed in float32. slots: int64 [n], distinct but for `padding`, which
    has no state.
    """
    assert output.is_contiguous()
    assert states[0].is_contiguous()
    assert convolved.is_contiguous()
    assert z.stride(1) == gates.stride(1) == 1
    if len(z):
        value_pad = round_to_power(shape.value_dim)
        columns = value_pad if len(z) <= _FEW_ROWS else min(_COLUMNS, value_pad)
        pdl = can_follow(z)
        _step[divide_up(shape.value_dim, columns), shape.num_value_heads, len(z)](
            convolved,
            z,
            z.stride(0),
            gates,
            gates.stride(0),
            states,
            states.stride(0),
            slots,
            weights.log_decay,
            weights.time_bias,
            weights.norm,
            output,
            padding,
            key_heads=shape.num_key_heads,
            value_heads=shape.num_value_heads,
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
            key_pad=round_to_power(shape.key_dim),
            columns=columns,
            norms=columns == value_pad,
            eps=weights.eps,
            pdl=pdl,
            num_warps=4,
            launch_pdl=pdl,
        )
        if columns < value_pad:
            norm_outputs(output, z, None, weights.norm, weights.eps, output)


@launch_quickly
@triton.jit(do_not_specialize=["padding"])
def _step(
    convolved,
    z,
    z_stride,
    gates,
    gate_stride,
    states,
    state_stride,
    slots,
    log_decay,
    time_bias,
    norm,
    output,
    padding,
    key_heads: tl.constexpr,
    value_heads: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    key_pad: tl.constexpr,
    columns: tl.constexpr,
    norms: tl.constexpr,
    eps: tl.constexpr,
    pdl: tl.constexpr,
):
    """One program advances some columns of one head of a row. Those that run at once read what lies together."""
    row, head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row)
    key_head = head // (value_heads // key_heads)
    i, j = tl.arange(0, key_pad), tl.program_id(0) * columns + tl.arange(0, columns)
    in_key, in_value = i < key_dim, j < value_dim
    place = states + slot * state_stride + head * key_dim * value_dim + i[:, None] * value_dim + j[None, :]
    has_state = (in_key[:, None] & in_value[None, :]) & (slot != padding)
    # The last step wrote it. Kernels that do not start early, such as the embedding's, have waited for that since.
    state = tl.load(place, mask=has_state, other=0.0)
    follow(pdl)
    num_channels: tl.constexpr = 2 * key_heads * key_dim + value_heads * value_dim
    of_row = convolved + row * num_channels
    query = tl.load(of_row + key_head * key_dim + i, mask=in_key, other=0.0).to(tl.float32)
    key = tl.load(of_row + (key_heads + key_head) * key_dim + i, mask=in_key, other=0.0).to(tl.float32)
    value = tl.load(of_row + 2 * key_heads * key_dim + head * value_dim + j, mask=in_value, other=0.0).to(tl.float32)
    beta, decay = load_rates(gates + row * gate_stride, log_decay, time_bias, head, value_heads, True)
    state = state.to(tl.float32) * tl.exp(decay)
    learned = beta * (value - tl.sum(state * key[:, None], 0))
    state += key[:, None] * learned[None, :]
    tl.store(place, state, mask=has_state)
    read = tl.sum(state * query[:, None], 0)
    of_head = row * value_heads * value_dim + head * value_dim + j
    read = read.to(output.dtype.element_ty)  # as a model in this dtype does, and as it is where a pass of its own norms
    if norms:
        read = read.to(tl.float32)
        gate = tl.load(z + row * z_stride + head * value_dim + j, mask=in_value, other=0.0)
        weight = tl.load(norm + j, mask=in_value, other=0.0)
        length = tl.sum(read * read, 0) / value_dim + eps
        read = norm_gated(read, tl.rsqrt(length), weight, gate)
    tl.store(output + of_head, read, mask=in_value)


@triton.jit
def load_rates(gates, log_decay, time_bias, head, value_heads: tl.constexpr, inside):
    """Returns beta and g of a head; gates points at tokens' b, and a follows. inside: tokens that have them."""
    b = tl.load(gates + head, mask=inside, other=0.0).to(tl.float32)
    a = tl.load(gates + value_heads + head, mask=inside, other=0.0).to(tl.float32)
    a += tl.load(time_bias + head)
    softplus = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
    return tl.sigmoid(b), -tl.exp(tl.load(log_decay + head)) * softplus
