"""The short convolution before the recurrence of a Gated DeltaNet layer, and its state: each row's newest inputs.

Queries and keys get length 1 in the same pass, and queries their scale. Knows no pages and no positions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from toka_async.kernels.delta.layer import DeltaShape, StepChunks
from toka_async.kernels.launches.pdl import can_follow, follow
from toka_async.kernels.launches.quick import launch_quickly
from toka_async.kernels.launches.sizes import divide_up, round_to_power

_ROWS = 4  # of a program, where each token is a row of its own
_TOKENS = 64  # of a program, where rows have several
_GROUPS = 8  # runs of these tokens side by side; the tokens of a run come one after the other
_REGISTERS = 128  # of a thread there, so that four programs fit a multiprocessor,
_MOST_VALUES = 128  # and of a head for which they suffice
_CHANNELS = 128  # of a program that keeps inputs,
_PIECES = 32  # and pieces that it looks at at once
NORM_EPS = 1e-6  # of the lengths of queries and keys


def convolve(
    projected: Tensor,
    states: Tensor,
    slots: Tensor,
    offsets: Tensor | None,
    weights: Tensor,
    shape: DeltaShape,
    padding: int,
) -> Tensor:
    """Convolves tokens; returns queries, keys and values, [t, channels].

    projected: [t, channels], a token's contiguous. states: [slots, width - 1, channels], oldest input first. slots:
    [t], of each token; `padding` has no state. offsets: int32 [t], each token's place in its row's chunk, from 1; 0: it
    is in no chunk, and what becomes of it has no meaning; None: each token is a row of its own, and becomes its slot's
    newest input. weights: [channels, width].
    """
    num_tokens = len(projected)
    convolved = torch.empty(num_tokens, shape.num_channels, dtype=projected.dtype, device=projected.device)
    assert projected.stride(1) == 1
    assert states.stride()[1:] == (shape.num_channels, 1)
    assert weights.is_contiguous()
    if num_tokens:
        tokens, dim_pad = _ROWS if offsets is None else _TOKENS, round_to_power(max(shape.key_dim, shape.value_dim))
        pdl = offsets is None and can_follow(projected)
        _convolve[2 * shape.num_key_heads + shape.num_value_heads, divide_up(num_tokens, tokens)](
            projected,
            projected.stride(0),
            states,
            states.stride(0),
            slots,
            slots if offsets is None else offsets,
            weights,
            convolved,
            num_tokens,
            padding,
            shape.key_dim**-0.5,
            is_step=offsets is None,
            key_heads=shape.num_key_heads,
            value_heads=shape.num_value_heads,
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
            dim_pad=dim_pad,
            width=shape.width,
            eps=NORM_EPS,
            tokens=tokens,
            groups=_GROUPS,
            pdl=pdl,
            num_warps=1 if offsets is None else 4,
            maxnreg=None if offsets is None or dim_pad > _MOST_VALUES else _REGISTERS,
            launch_pdl=pdl,
        )
    return convolved


@launch_quickly
@triton.jit(do_not_specialize=["num_tokens", "padding"])
def _convolve(
    projected,
    stride,
    states,
    state_stride,
    slots,
    offsets,
    weights,
    convolved,
    num_tokens,
    padding,
    scale,
    is_step: tl.constexpr,
    key_heads: tl.constexpr,
    value_heads: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    dim_pad: tl.constexpr,
    width: tl.constexpr,
    eps: tl.constexpr,
    tokens: tl.constexpr,
    groups: tl.constexpr,
    pdl: tl.constexpr,
):
    """One program convolves one head of some tokens."""
    follow(pdl)
    head = tl.program_id(0)
    column = tl.arange(0, dim_pad)
    num_channels: tl.constexpr = 2 * key_heads * key_dim + value_heads * value_dim
    is_value = head >= 2 * key_heads
    dim = tl.where(is_value, value_dim, key_dim)
    first = tl.where(is_value, 2 * key_heads * (key_dim - value_dim) + head * value_dim, head * key_dim)
    channel = first + column
    in_head = column < dim
    token = tl.program_id(1).to(tl.int64) * tokens + tl.arange(0, tokens)
    in_step = token < num_tokens
    if is_step:
        target = convolved + token[:, None] * num_channels + channel[None, :]
        wanted = in_step[:, None] & in_head[None, :]
        slot = tl.load(slots + token, mask=in_step, other=0).to(tl.int64)
        kept = states + slot[:, None] * state_stride + channel[None, :]
        has_state = wanted & (slot != padding)[:, None]
        total = tl.zeros((tokens, dim_pad), tl.float32)
        for tap in tl.static_range(width):
            if tap < width - 1:
                x = tl.load(kept + tap * num_channels, mask=has_state, other=0.0)
            else:
                x = tl.load(projected + token[:, None] * stride + channel[None, :], mask=wanted, other=0.0)
            total += x.to(tl.float32) * _load_weight(weights, channel, in_head, tap, width)
            if tap > 0:
                tl.store(kept + (tap - 1) * num_channels, x, mask=has_state)
        _store_head(total, target, wanted, head, scale, key_heads, eps)
    else:
        length: tl.constexpr = tokens // groups
        offset = tl.load(offsets + token, mask=in_step, other=0) - 1
        of_program = tl.program_id(1).to(tl.int64) * tokens + tl.arange(0, groups) * length
        if tl.min(tl.where(offset < 0, width, offset), 0) < width - 1:
            # A chunk's first tokens, which few programs have. All others do not look for what was before them.
            for place in range(length):
                _convolve_first(
                    projected,
                    stride,
                    states,
                    state_stride,
                    slots,
                    offsets,
                    weights,
                    convolved,
                    of_program + place,
                    num_tokens,
                    padding,
                    scale,
                    head,
                    channel,
                    in_head,
                    key_heads,
                    num_channels,
                    width,
                    eps,
                )
        elif tl.max(offset, 0) >= 0:  # there is a token of a chunk
            _convolve_runs(
                projected,
                stride,
                offsets,
                weights,
                convolved,
                of_program,
                num_tokens,
                scale,
                head,
                channel,
                in_head,
                key_heads,
                num_channels,
                length,
                width,
                eps,
            )


@triton.jit
def _convolve_first(
    projected,
    stride,
    states,
    state_stride,
    slots,
    offsets,
    weights,
    convolved,
    token,
    num_tokens,
    padding,
    scale,
    head,
    channel,
    in_head,
    key_heads: tl.constexpr,
    num_channels: tl.constexpr,
    width: tl.constexpr,
    eps: tl.constexpr,
):
    """Convolves tokens that may be the first of their chunks, after the newest inputs of their slots."""
    in_step = token < num_tokens
    offset = tl.load(offsets + token, mask=in_step, other=0) - 1
    slot = tl.load(slots + token, mask=in_step, other=0).to(tl.int64)
    kept = states + slot[:, None] * state_stride + channel[None, :]
    wanted = (offset >= 0)[:, None] & in_head[None, :]
    total = tl.zeros(wanted.shape, tl.float32)
    for tap in tl.static_range(width):
        is_here = (offset >= width - 1 - tap)[:, None]
        place = projected + (token - (width - 1 - tap))[:, None] * stride + channel[None, :]
        x = tl.load(place, mask=wanted & is_here, other=0.0)
        before = wanted & ~is_here & (slot != padding)[:, None]
        x += tl.load(kept + (tap + offset[:, None]) * num_channels, mask=before, other=0.0)
        total += x.to(tl.float32) * _load_weight(weights, channel, in_head, tap, width)
    target = convolved + token[:, None] * num_channels + channel[None, :]
    _store_head(total, target, wanted, head, scale, key_heads, eps)


@triton.jit
def _convolve_runs(
    projected,
    stride,
    offsets,
    weights,
    convolved,
    start,
    num_tokens,
    scale,
    head,
    channel,
    in_head,
    key_heads: tl.constexpr,
    num_channels: tl.constexpr,
    length: tl.constexpr,
    width: tl.constexpr,
    eps: tl.constexpr,
):
    """Convolves runs of tokens from `start` on. Each input is read once, and all before the first output is written."""
    inputs, places, factors, newest = tl.tuple(()), tl.tuple(()), tl.tuple(()), tl.tuple(())
    for number in tl.static_range(length + width - 1):
        token = start + (number - (width - 1))
        inside = (token >= 0) & (token < num_tokens)
        source = projected + token[:, None] * stride + channel[None, :]
        inputs += (tl.load(source, mask=inside[:, None] & in_head[None, :], other=0.0),)
        places += (tl.load(offsets + token, mask=inside, other=0),)
    for tap in tl.static_range(width):
        factors += (_load_weight(weights, channel, in_head, tap, width),)
    for number in tl.static_range(length + width - 1):
        newest += (inputs[number].to(tl.float32),)
        if number >= width - 1:
            total = newest[number - (width - 1)] * factors[0]
            for tap in tl.static_range(1, width):
                total += newest[number - (width - 1) + tap] * factors[tap]
            target = convolved + (start + (number - (width - 1)))[:, None] * num_channels + channel[None, :]
            wanted = (places[number] > 0)[:, None] & in_head[None, :]
            _store_head(total, target, wanted, head, scale, key_heads, eps)


@triton.jit
def _load_weight(weights, channel, in_head, tap, width: tl.constexpr):
    """Loads the weights of one tap, [1, dim_pad]."""
    return tl.load(weights + channel * width + tap, mask=in_head, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _store_head(total, target, wanted, head, scale, key_heads: tl.constexpr, eps: tl.constexpr):
    """Stores a head of tokens after SiLU: queries and keys with length 1, queries with their scale."""
    active = total * tl.sigmoid(total)
    length = tl.rsqrt(tl.sum(active * active, 1) + eps)
    factor = tl.where(head >= 2 * key_heads, 1.0, length * tl.where(head < key_heads, scale, 1.0))
    tl.store(target, (active * factor[:, None]).to(target.dtype.element_ty), mask=wanted)


def keep_inputs(projected: Tensor, states: Tensor, chunks: StepChunks, shape: DeltaShape) -> None:
    """Makes the last tokens of chunks their slots' newest inputs, and keeps those of pieces where they ask for it.

    projected, states: see `convolve`.
    """
    grid = chunks.programs.chunks, divide_up(shape.num_channels, _CHANNELS)
    _keep[grid](
        projected,
        projected.stride(0),
        states,
        states.stride(0),
        chunks.counts,
        chunks.pieces,
        chunks.chunks,
        num_channels=shape.num_channels,
        width=shape.width,
        channels=_CHANNELS,
        at_once=_PIECES,
        num_warps=1,
    )


@launch_quickly
@triton.jit
def _keep(
    projected,
    stride,
    states,
    state_stride,
    counts,
    pieces,
    chunks,
    num_channels: tl.constexpr,
    width: tl.constexpr,
    channels: tl.constexpr,
    at_once: tl.constexpr,
):
    """One program goes through a chunk's pieces, for some channels: what they keep is read before it is replaced."""
    channel = tl.program_id(1) * channels + tl.arange(0, channels)
    inside = channel < num_channels
    for of_step in range(tl.program_id(0), tl.load(counts + 1), tl.num_programs(0)):
        chunk = chunks + 3 * of_step
        first_piece, num_pieces, slot = tl.load(chunk), tl.load(chunk + 1), tl.load(chunk + 2).to(tl.int64)
        first = tl.load(pieces + 3 * first_piece)
        old = states + slot * state_stride + channel
        end_piece = first_piece + num_pieces
        for begin in range(first_piece, end_piece, at_once):
            some = begin + tl.arange(0, at_once)
            targets = tl.load(pieces + 3 * some + 2, mask=some < end_piece, other=-1)
            if tl.max(targets, 0) >= 0:  # few pieces are kept
                for number in range(begin, tl.minimum(begin + at_once, end_piece)):
                    piece = pieces + 3 * number
                    kept = tl.load(piece + 2).to(tl.int64)
                    if kept >= 0:
                        end = tl.load(piece) + tl.load(piece + 1)
                        target = states + kept * state_stride + channel
                        _copy_inputs(projected, stride, old, target, first, end, channel, inside, num_channels, width)
        last = pieces + 3 * (end_piece - 1)
        end = tl.load(last) + tl.load(last + 1)
        _copy_inputs(projected, stride, old, old, first, end, channel, inside, num_channels, width)


@triton.jit
def _copy_inputs(
    projected, stride, old, target, first, end, channel, inside, num_channels: tl.constexpr, width: tl.constexpr
):
    """Copies the inputs of the tokens before `end`; those before the chunk's first are in `old`.

    A place is written when all that come from it are read: places are read in ascending order, and each goes to a lower
    or the same place.
    """
    for place in tl.static_range(width - 1):
        token = end - (width - 1) + place
        is_new = token >= first
        x = tl.load(projected + token.to(tl.int64) * stride + channel, mask=inside & is_new, other=0.0)
        before = tl.load(old + (width - 1 + token - first) * num_channels, mask=inside & (token < first), other=0.0)
        tl.store(target + place * num_channels, tl.where(is_new, x, before), mask=inside)
