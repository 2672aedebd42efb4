"""The gated delta rule for chunks of prompts, by pieces of some tokens (arXiv:2412.06464, section 3.3).

Within a piece each token's value depends on those before it by a triangular system. A first kernel solves it for all
pieces at once, as far as it does not depend on the state; a second one takes the states of chunks through their pieces.
A third one norms and gates what was read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from toka_async.kernels.delta.layer import DeltaShape, DeltaWeights
from toka_async.kernels.delta.step import load_rates, norm_gated

_BLOCKS = 4  # of a piece, whose systems are solved row by row; the rest is products
_VALUES = 32  # of a head, whose states one program takes through the pieces
_TOKENS = 16  # of a program that norms


def count_piece_tokens(dtype: torch.dtype) -> int:
    """Counts the tokens of a piece: as many as a GPU's registers hold."""
    return 32 if dtype == torch.float32 else 64


def read_chunks(
    convolved: Tensor,
    gates: Tensor,
    states: Tensor,
    pieces: Tensor,
    chunks: Tensor,
    weights: DeltaWeights,
    shape: DeltaShape,
) -> Tensor:
    """Takes the states of chunks behind their last tokens; returns what tokens read from them, [t, values].

    convolved: [t, channels] and gates [t, 2 * value heads], of all tokens of the step that the pieces count; only those
    of chunks are read. states: float32 [slots, value heads, key_dim, value_dim]. pieces, chunks: int32 [p, 3] and
    [k, 3], see `ChunkPieces`.
    """
    num_tokens, heads = len(convolved), shape.num_value_heads
    learned = convolved.new_empty(num_tokens, heads, shape.value_dim)
    reads = convolved.new_empty(num_tokens, heads, shape.key_dim)
    output = convolved.new_empty(num_tokens, shape.num_values)
    assert states[0].is_contiguous()
    assert convolved.is_contiguous()
    key_pad, value_pad = (max(16, triton.next_power_of_2(dim)) for dim in (shape.key_dim, shape.value_dim))
    dims = {
        "key_heads": shape.num_key_heads,
        "value_heads": heads,
        "key_dim": shape.key_dim,
        "value_dim": shape.value_dim,
        "key_pad": key_pad,
        "tokens": count_piece_tokens(convolved.dtype),
        "precision": "tf32x3" if convolved.dtype == torch.float32 else "tf32",
    }
    rates = gates, gates.stride(0), weights.log_decay, weights.time_bias
    _solve[len(pieces), heads](
        convolved, *rates, pieces, learned, reads, value_pad=value_pad, count=_BLOCKS, num_warps=8, **dims
    )
    values = min(_VALUES // 2 if convolved.dtype == torch.float32 else _VALUES, value_pad)
    _read[len(chunks), heads, triton.cdiv(shape.value_dim, values)](
        convolved,
        *rates,
        states,
        states.stride(0),
        pieces,
        chunks,
        learned,
        reads,
        output,
        values=values,
        num_warps=8 if convolved.dtype == torch.float32 else 4,
        num_stages=2,
        **dims,
    )
    return output


@triton.jit
def _load_decays(gates, stride, log_decay, time_bias, token, inside, head, value_heads: tl.constexpr):
    """Returns beta and the sums of g up to each token of a piece; tokens behind its end decay nothing."""
    beta, decay = load_rates(gates + token * stride, log_decay, time_bias, head, value_heads)
    return tl.where(inside, beta, 0.0), tl.cumsum(tl.where(inside, decay, 0.0), 0)


@triton.jit
def _solve(
    convolved,
    gates,
    gate_stride,
    log_decay,
    time_bias,
    pieces,
    learned,
    reads,
    key_heads: tl.constexpr,
    value_heads: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    key_pad: tl.constexpr,
    value_pad: tl.constexpr,
    tokens: tl.constexpr,
    count: tl.constexpr,
    precision: tl.constexpr,
):
    """One program solves one head of a piece: what tokens learn without a state, and how much of one they replace."""
    piece, head = pieces + 3 * tl.program_id(0), tl.program_id(1)
    first, length = tl.load(piece), tl.load(piece + 1)
    t, i, j = tl.arange(0, tokens), tl.arange(0, key_pad), tl.arange(0, value_pad)
    inside = t < length
    token = (first + tl.where(inside, t, 0)).to(tl.int64)
    num_channels: tl.constexpr = 2 * key_heads * key_dim + value_heads * value_dim
    key_head = head // (value_heads // key_heads)
    in_keys, in_values = inside[:, None] & (i < key_dim)[None, :], inside[:, None] & (j < value_dim)[None, :]
    of_keys = convolved + token[:, None] * num_channels + ((key_heads + key_head) * key_dim + i)[None, :]
    of_values = convolved + token[:, None] * num_channels + (2 * key_heads * key_dim + head * value_dim + j)[None, :]
    key = tl.load(of_keys, mask=in_keys, other=0.0)
    beta, total = _load_decays(gates, gate_stride, log_decay, time_bias, token, inside, head, value_heads)
    is_before = t[:, None] > t[None, :]
    remains = tl.exp(tl.where(is_before, total[:, None] - total[None, :], 0.0))
    system = tl.dot(key, tl.trans(key), input_precision=precision) * remains * beta[:, None]
    inverse = _invert(tl.where(is_before, system, 0.0), tokens, count).to(key.dtype)
    known_keys = (key * (beta * tl.exp(total))[:, None]).to(key.dtype)
    place = (token * value_heads + head)[:, None]
    solved_keys = tl.dot(inverse, known_keys, input_precision=precision)
    tl.store(reads + place * key_dim + i[None, :], solved_keys.to(key.dtype), mask=in_keys)
    known = (tl.load(of_values, mask=in_values, other=0.0) * beta[:, None]).to(key.dtype)
    solved = tl.dot(inverse, known, input_precision=precision)
    tl.store(learned + place * value_dim + j[None, :], solved.to(key.dtype), mask=in_values)


@triton.jit
def _invert(lower, tokens: tl.constexpr, count: tl.constexpr):
    """Inverts 1 + lower, [tokens, tokens], where `lower` is strictly lower triangular.

    The blocks on the diagonal, four, are inverted row by row, all at once. Their inverse times the rest is M, whose
    fourth power is zero: (1 + M)^-1 = (1 - M)(1 + M^2).
    """
    block: tl.constexpr = tokens // count
    tl.static_assert(count == 4)
    n, r = tl.arange(0, count), tl.arange(0, block)
    is_diagonal = (n[:, None] == n[None, :])[:, None, :, None]
    blocks = tl.reshape(lower, (count, block, count, block))
    inverse = -tl.sum(tl.where(is_diagonal, blocks, 0.0), 2)  # [count, block, block]
    for row in range(1, block):
        is_row = (r == row)[None, :, None]
        this = tl.sum(tl.where(is_row, inverse, 0.0), 1)
        this += tl.sum(this[:, :, None] * inverse, 1)
        inverse = tl.where(is_row, this[:, None, :], inverse)
    inverse += (r[:, None] == r[None, :]).to(tl.float32)[None, :, :]
    of_blocks = tl.reshape(tl.where(is_diagonal, inverse[:, :, None, :], 0.0), (tokens, tokens))
    rest = tl.reshape(tl.where(is_diagonal, 0.0, blocks), (tokens, tokens))
    rest = tl.dot(of_blocks, rest, input_precision="tf32x3")
    square = tl.dot(rest, rest, input_precision="tf32x3")
    of_blocks += tl.dot(square, of_blocks, input_precision="tf32x3")
    return of_blocks - tl.dot(rest, of_blocks, input_precision="tf32x3")


@triton.jit
def _read(
    convolved,
    gates,
    gate_stride,
    log_decay,
    time_bias,
    states,
    state_stride,
    pieces,
    chunks,
    learned,
    reads,
    output,
    key_heads: tl.constexpr,
    value_heads: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    key_pad: tl.constexpr,
    tokens: tl.constexpr,
    values: tl.constexpr,
    precision: tl.constexpr,
):
    """One program takes some values of a head's state through a chunk."""
    chunk, head = chunks + 3 * tl.program_id(0), tl.program_id(1)
    first_piece, num_pieces, slot = tl.load(chunk), tl.load(chunk + 1), tl.load(chunk + 2).to(tl.int64)
    t, i = tl.arange(0, tokens), tl.arange(0, key_pad)
    j = tl.program_id(2) * values + tl.arange(0, values)
    in_state = (i < key_dim)[:, None] & (j < value_dim)[None, :]
    of_state = states + head * key_dim * value_dim + i[:, None] * value_dim + j[None, :]
    state = tl.load(of_state + slot * state_stride, mask=in_state, other=0.0)
    num_channels: tl.constexpr = 2 * key_heads * key_dim + value_heads * value_dim
    of_head = head // (value_heads // key_heads) * key_dim + i
    for number in range(first_piece, first_piece + num_pieces):
        piece = pieces + 3 * number
        first, length, kept = tl.load(piece), tl.load(piece + 1), tl.load(piece + 2).to(tl.int64)
        inside = t < length
        token = (first + tl.where(inside, t, 0)).to(tl.int64)
        in_keys, in_values = inside[:, None] & (i < key_dim)[None, :], inside[:, None] & (j < value_dim)[None, :]
        queries = convolved + token[:, None] * num_channels + of_head[None, :]
        query = tl.load(queries, mask=in_keys, other=0.0)
        key = tl.load(queries + key_heads * key_dim, mask=in_keys, other=0.0)
        place = (token * value_heads + head)[:, None]
        read = tl.load(reads + place * key_dim + i[None, :], mask=in_keys, other=0.0)
        value = tl.load(learned + place * value_dim + j[None, :], mask=in_values, other=0.0)
        _, total = _load_decays(gates, gate_stride, log_decay, time_bias, token, inside, head, value_heads)
        last = tl.sum(tl.where(t == length - 1, total, 0.0), 0)
        rounded = state.to(key.dtype)
        new = (value - tl.dot(read, rounded, input_precision=precision)).to(key.dtype)
        is_seen = t[:, None] >= t[None, :]
        remains = tl.where(is_seen, tl.exp(tl.where(is_seen, total[:, None] - total[None, :], 0.0)), 0.0)
        scores = (tl.dot(query, tl.trans(key), input_precision=precision) * remains).to(key.dtype)
        seen = tl.dot(query, rounded, input_precision=precision) * tl.exp(total)[:, None]
        seen += tl.dot(scores, new, input_precision=precision)
        tl.store(output + place * value_dim + j[None, :], seen.to(key.dtype), mask=in_values)
        left = (key * tl.where(inside, tl.exp(last - total), 0.0)[:, None]).to(key.dtype)
        state = state * tl.exp(last) + tl.dot(tl.trans(left), new, input_precision=precision)
        if kept >= 0:
            tl.store(of_state + kept * state_stride, state, mask=in_state)
    tl.store(of_state + slot * state_stride, state, mask=in_state)


def norm_outputs(read: Tensor, z: Tensor, norm: Tensor, eps: float) -> Tensor:
    """Norms each head of [t, values] by the weight `norm` [value_dim], and gates it with z [t, values]."""
    output = torch.empty_like(read)
    num_heads = read.shape[1] // len(norm)
    assert z.stride(1) == 1
    if len(read):
        _norm[triton.cdiv(len(read), _TOKENS), num_heads](
            read,
            z,
            z.stride(0),
            norm,
            output,
            len(read),
            num_heads=num_heads,
            dim=len(norm),
            dim_pad=triton.next_power_of_2(len(norm)),
            eps=eps,
            tokens=_TOKENS,
            num_warps=4,
        )
    return output


@triton.jit(do_not_specialize=["num_tokens"])
def _norm(
    read,
    z,
    z_stride,
    norm,
    output,
    num_tokens,
    num_heads: tl.constexpr,
    dim: tl.constexpr,
    dim_pad: tl.constexpr,
    eps: tl.constexpr,
    tokens: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * tokens + tl.arange(0, tokens)
    head, j = tl.program_id(1), tl.arange(0, dim_pad)
    inside = (token < num_tokens)[:, None] & (j < dim)[None, :]
    place = (token * num_heads + head)[:, None] * dim + j[None, :]
    x = tl.load(read + place, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(z + token[:, None] * z_stride + (head * dim + j)[None, :], mask=inside, other=0.0)
    weight = tl.load(norm + j, mask=j < dim, other=0.0)[None, :]
    factor = tl.rsqrt(tl.sum(x * x, 1) / dim + eps)[:, None]
    tl.store(output + place, norm_gated(x, factor, weight, gate), mask=inside)
