"""The gated delta rule for chunks of prompts, by pieces of some tokens (arXiv:2412.06464, section 3.3).

Within a piece each token's value depends on those before it by a triangular system. A first kernel computes for all
pieces at once what does not depend on the state; a second one takes the states of chunks through their pieces, one
after the other, and so does as little as it can.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from toka_async.kernels.delta.layer import DeltaShape, DeltaWeights, Programs, StepChunks
from toka_async.kernels.delta.step import load_rates
from toka_async.kernels.launches.quick import launch_quickly
from toka_async.kernels.launches.sizes import divide_up, round_to_power

_BLOCKS = 4  # of a piece, whose systems are solved row by row; the rest is products
_SOLVING = 3  # programs that run at once on a multiprocessor, with 16-bit values
_CHUNKS = 16  # programs that keep chunks' newest inputs, for each part of the channels
# Chunks' tokens for each decoding row, as measured on an H200 with 32 heads of 128: from so many on
_TWO_THIRDS = 6  # chunks get two thirds of the programs that solve, instead of one, and half of those that read,
_MOST_READERS = 20  # three fourths of those that read,
_ALL_READERS = 24  # all that read,
_ALL = 32  # and all that solve.
_TOKENS_BESIDE = 2048  # of chunks, for each program that reads, where there are fewer than `_TWO_THIRDS` for each row
_REGISTERS = 168  # of a thread that solves 16-bit values, so that `_SOLVING` programs run at once
_MOST_KEYS = 128  # of a head, of which a chip's shared memory holds several pieces
_UNLIMITED = 2**31 - 1


@dataclass(slots=True, frozen=True)
class ReadTile:
    """values: of a head, whose states one program takes through the pieces. stages: see Triton's `num_stages`."""

    values: int
    warps: int
    stages: int


def choose_tile(dtype: torch.dtype, key_pad: int, device: torch.device) -> ReadTile:
    """With three stages a Hopper chip loads two pieces ahead, into most of a multiprocessor's shared memory."""
    if dtype == torch.float32:
        return ReadTile(16, 8, 1)
    if key_pad > _MOST_KEYS:
        return ReadTile(32, 4, 1)
    return ReadTile(128, 8, 3) if has_large_memory(device) else ReadTile(32, 4, 2)


def has_large_memory(device: torch.device) -> bool:
    """Tells whether it is a Hopper chip, whose registers hold a whole head's state, too."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def count_piece_tokens(dtype: torch.dtype) -> int:
    """Counts the tokens of a piece: as many as a GPU's registers hold."""
    return 32 if dtype == torch.float32 else 64


def count_programs(heads: int, device: torch.device) -> Programs:
    """Counts programs to start for a step that has decoding rows as well, however many pieces and chunks there are.

    On a Hopper chip, with 16-bit values, so many run at once.
    """
    of_head = max(1, _count_processors(device) // heads)
    if has_tensor_memory(device):  # which does not hold what a loop over pieces keeps there
        return Programs(_UNLIMITED, _CHUNKS, of_head)
    return Programs(_SOLVING * of_head, _CHUNKS, of_head)


def choose_programs(num_rows: int, num_tokens: int, most: Programs) -> Programs:
    """Chooses how many of the programs take part in a step of so many decoding rows and tokens of chunks.

    Few of them take many pieces and chunks, so that they leave room for those of rows, which would wait for them all.
    But where rows end long before chunks, they need no room.
    """
    if num_tokens >= _ALL * num_rows:
        return most
    thirds = 2 if num_tokens >= _TWO_THIRDS * num_rows else 1
    solving = _UNLIMITED if most.pieces == _UNLIMITED else divide_up(thirds * most.pieces, 3)
    if num_tokens >= _ALL_READERS * num_rows:
        return Programs(solving, most.chunks, most.readers)
    if num_tokens >= _MOST_READERS * num_rows:
        return Programs(solving, most.chunks, divide_up(3 * most.readers, 4))
    half = divide_up(most.readers, 2)
    readers = half if thirds == 2 else min(half, max(1, round(num_tokens / _TOKENS_BESIDE)))
    return Programs(solving, most.chunks, readers)


def _count_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def has_tensor_memory(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 10


def read_chunks(
    convolved: Tensor,
    gates: Tensor,
    states: Tensor,
    chunks: StepChunks,
    weights: DeltaWeights,
    shape: DeltaShape,
) -> Tensor:
    """Takes the states of chunks behind their last tokens; returns what their tokens read from them, [t, values].

    convolved: [t, channels] and gates [t, 2 * value heads], of all tokens of the step; only those of chunks are read,
    and written. states: [slots, value heads, key_dim, value_dim], in float32 between loads and stores.
    """
    num_tokens, heads = len(convolved), shape.num_value_heads
    learned = convolved.new_empty(num_tokens, heads, shape.value_dim)
    reads = convolved.new_empty(num_tokens, heads, shape.key_dim)
    output = convolved.new_empty(num_tokens, shape.num_values)
    assert states[0].is_contiguous()
    assert convolved.is_contiguous()
    tokens = count_piece_tokens(convolved.dtype)
    key_pad, value_pad = (max(16, round_to_power(dim)) for dim in (shape.key_dim, shape.value_dim))
    dims = {
        "key_heads": shape.num_key_heads,
        "value_heads": heads,
        "key_dim": shape.key_dim,
        "value_dim": shape.value_dim,
        "key_pad": key_pad,
        "tokens": tokens,
        "precision": "tf32x3" if convolved.dtype == torch.float32 else "tf32",
    }
    scores = convolved.new_empty(num_tokens, heads, tokens)
    decays = torch.empty(heads, num_tokens, 2, dtype=torch.float32, device=convolved.device)
    of_pieces = chunks.counts, chunks.pieces
    solved = learned, reads, scores, decays
    _solve[heads, chunks.programs.pieces](
        convolved,
        gates,
        gates.stride(0),
        weights.log_decay,
        weights.time_bias,
        *of_pieces,
        *solved,
        num_tokens,
        value_pad=value_pad,
        count=_BLOCKS,
        takes_several=3 * chunks.programs.pieces < len(chunks.pieces),
        num_warps=8 if convolved.dtype == torch.float32 else 4,
        maxnreg=None if convolved.dtype == torch.float32 else _REGISTERS,
        **dims,
    )
    tile = choose_tile(convolved.dtype, key_pad, convolved.device)
    values = min(tile.values, value_pad)
    _read[chunks.programs.readers, heads, divide_up(shape.value_dim, values)](
        convolved,
        states,
        states.stride(0),
        *of_pieces,
        chunks.chunks,
        *solved,
        output,
        num_tokens,
        values=values,
        num_warps=tile.warps,
        stages=tile.stages,
        **dims,
    )
    return output


@launch_quickly
@triton.jit(do_not_specialize=["num_tokens"])
def _solve(
    convolved,
    gates,
    gate_stride,
    log_decay,
    time_bias,
    counts,
    pieces,
    learned,
    reads,
    scores,
    decays,
    num_tokens,
    key_heads: tl.constexpr,
    value_heads: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    key_pad: tl.constexpr,
    value_pad: tl.constexpr,
    tokens: tl.constexpr,
    count: tl.constexpr,
    precision: tl.constexpr,
    takes_several: tl.constexpr,
):
    """One program solves one head of a piece: what tokens learn without a state, and how much of one they replace.

    It also stores the products of queries and keys, and how much decays: until a token, and from it to the last one.
    takes_several: there may be more pieces than programs.
    """
    if takes_several:
        # Hoisting out of the loop what does not change would take more registers than there are.
        step = tl.maximum(tl.load(counts + 2), 1)  # 0 where a graph is captured
        end = tl.where(tl.program_id(1) < step, tl.load(counts), 0)
        for number in tl.range(tl.program_id(1), end, step, num_stages=1, disable_licm=True):
            _solve_piece(
                convolved,
                gates,
                gate_stride,
                log_decay,
                time_bias,
                pieces + 3 * number,
                learned,
                reads,
                scores,
                decays,
                num_tokens,
                key_heads,
                value_heads,
                key_dim,
                value_dim,
                key_pad,
                value_pad,
                tokens,
                count,
                precision,
            )
    elif tl.program_id(1) < tl.load(counts):
        _solve_piece(
            convolved,
            gates,
            gate_stride,
            log_decay,
            time_bias,
            pieces + 3 * tl.program_id(1),
            learned,
            reads,
            scores,
            decays,
            num_tokens,
            key_heads,
            value_heads,
            key_dim,
            value_dim,
            key_pad,
            value_pad,
            tokens,
            count,
            precision,
        )


@triton.jit
def _solve_piece(
    convolved,
    gates,
    gate_stride,
    log_decay,
    time_bias,
    piece,
    learned,
    reads,
    scores,
    decays,
    num_tokens,
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
    head, t, i, j = tl.program_id(0), tl.arange(0, tokens), tl.arange(0, key_pad), tl.arange(0, value_pad)
    num_channels: tl.constexpr = 2 * key_heads * key_dim + value_heads * value_dim
    first, length = tl.load(piece).to(tl.int64), tl.load(piece + 1)
    is_before, inside = t[:, None] > t[None, :], t < length
    in_keys, in_values = inside[:, None] & (i < key_dim)[None, :], inside[:, None] & (j < value_dim)[None, :]
    rates = gates + first * gate_stride + t * gate_stride
    beta, decay = load_rates(rates, log_decay, time_bias, head, value_heads, inside)
    beta, total = tl.where(inside, beta, 0.0), tl.cumsum(tl.where(inside, decay, 0.0), 0)
    last = tl.sum(tl.where(t == length - 1, total, 0.0), 0)
    scales = tl.join(tl.exp(total), tl.exp(tl.where(inside, last - total, 0.0)))
    of_decays = 2 * t[:, None] + tl.arange(0, 2)[None, :]
    tl.store(decays + 2 * (head * num_tokens + first) + of_decays, scales, mask=inside[:, None])
    remains = tl.exp(tl.where(is_before, total[:, None] - total[None, :], 0.0))
    queries = convolved + first * num_channels + head // (value_heads // key_heads) * key_dim
    of_query, place = t[:, None] * num_channels + i[None, :], first * value_heads + head
    key = tl.load(queries + key_heads * key_dim + of_query, mask=in_keys, other=0.0)
    query = tl.load(queries + of_query, mask=in_keys, other=0.0)
    score = tl.dot(query, tl.trans(key), input_precision=precision) * remains
    score = tl.where(t[:, None] >= t[None, :], score, 0.0).to(key.dtype)
    tl.store(scores + place * tokens + t[:, None] * (value_heads * tokens) + t[None, :], score, mask=inside[:, None])
    # Loaded again, as it would otherwise take registers all the time.
    key = tl.load(queries + key_heads * key_dim + of_query, mask=in_keys, other=0.0)
    system = tl.dot(key, tl.trans(key), input_precision=precision) * remains * beta[:, None]
    inverse = _invert(tl.where(is_before, system, 0.0), tokens, count, precision) * beta[None, :]
    of_keys = (inverse * tl.exp(total)[None, :]).to(key.dtype)
    solved_keys = tl.dot(of_keys, key, input_precision=precision).to(key.dtype)
    tl.store(reads + place * key_dim + t[:, None] * (value_heads * key_dim) + i[None, :], solved_keys, mask=in_keys)
    values = convolved + first * num_channels + (2 * key_heads * key_dim + head * value_dim)
    value = tl.load(values + t[:, None] * num_channels + j[None, :], mask=in_values, other=0.0)
    solved = tl.dot(inverse.to(key.dtype), value, input_precision=precision).to(key.dtype)
    tl.store(learned + place * value_dim + t[:, None] * (value_heads * value_dim) + j[None, :], solved, mask=in_values)


@triton.jit
def _invert(lower, tokens: tl.constexpr, count: tl.constexpr, precision: tl.constexpr):
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
    rest = tl.dot(of_blocks, rest, input_precision=precision)
    square = tl.dot(rest, rest, input_precision=precision)
    of_blocks += tl.dot(square, of_blocks, input_precision=precision)
    return of_blocks - tl.dot(rest, of_blocks, input_precision=precision)


@launch_quickly
@triton.jit(do_not_specialize=["num_tokens"])
def _read(
    convolved,
    states,
    state_stride,
    counts,
    pieces,
    chunks,
    learned,
    reads,
    scores,
    decays,
    output,
    num_tokens,
    key_heads: tl.constexpr,
    value_heads: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    key_pad: tl.constexpr,
    tokens: tl.constexpr,
    values: tl.constexpr,
    precision: tl.constexpr,
    stages: tl.constexpr,
):
    """One program takes some values of a head's state through chunks.

    It has the state as [values, keys], so that what all products begin with stays in registers: from one piece to the
    next nothing passes through shared memory, into which the next pieces' tiles are loaded meanwhile.
    """
    head, t, i = tl.program_id(1), tl.arange(0, tokens), tl.arange(0, key_pad)
    j = tl.program_id(2) * values + tl.arange(0, values)
    in_key, in_value = (i < key_dim)[None, :], (j < value_dim)[None, :]
    in_state = (j < value_dim)[:, None] & in_key
    of_state = head * key_dim * value_dim + i[None, :] * value_dim + j[:, None]
    num_channels: tl.constexpr = 2 * key_heads * key_dim + value_heads * value_dim
    # Of tiles, from their first token on: the same for all pieces, so that these add little to them.
    of_query = t[:, None] * num_channels + i[None, :]
    of_keys = t[:, None] * (value_heads * key_dim) + i[None, :]
    of_values = t[:, None] * (value_heads * value_dim) + j[None, :]
    of_scores = t[:, None] * (value_heads * tokens) + t[None, :]
    convolved += head // (value_heads // key_heads) * key_dim
    of_decays, is_first = 2 * t[:, None] + tl.arange(0, 2)[None, :], (tl.arange(0, 2) == 0)[None, :]
    decays += 2 * head * num_tokens
    step = tl.maximum(tl.load(counts + 3), 1)  # 0 where a graph is captured
    end = tl.where(tl.program_id(0) < step, tl.load(counts + 1), 0)
    for of_step in tl.range(tl.program_id(0), end, step, num_stages=1):
        chunk = chunks + 3 * of_step
        first_piece, num_pieces, slot = tl.load(chunk), tl.load(chunk + 1), tl.load(chunk + 2).to(tl.int64)
        own = states + slot * state_stride + of_state
        state = tl.load(own, mask=in_state, other=0.0).to(tl.float32)
        piece = pieces + 3 * first_piece
        start, length = tl.load(piece), tl.load(piece + 1)
        for number in tl.range(1, num_pieces + 1, num_stages=stages):
            first, inside = start.to(tl.int64), t < length
            in_keys, in_values, place = inside[:, None] & in_key, inside[:, None] & in_value, first * value_heads + head
            read = tl.load(reads + place * key_dim + of_keys, mask=in_keys, other=0.0)
            queries = convolved + first * num_channels
            query = tl.load(queries + of_query, mask=in_keys, other=0.0)
            key = tl.load(queries + key_heads * key_dim + of_query, mask=in_keys, other=0.0)
            score = tl.load(scores + place * tokens + of_scores, mask=inside[:, None], other=0.0)
            value = tl.load(learned + place * value_dim + of_values, mask=in_values, other=0.0)
            scales = tl.load(decays + 2 * first + of_decays, mask=inside[:, None], other=0.0)
            # What remains of the state at a token, and of its value behind the piece. As sums, since Triton would
            # otherwise load them in the layout of products, in which each thread has a fourth of them.
            remains, lasts = tl.sum(tl.where(is_first, scales, 0.0), 1), tl.sum(tl.where(is_first, 0.0, scales), 1)
            whole = tl.load(decays + 2 * (first + length - 1))
            rounded = state.to(key.dtype)
            new = tl.trans(value) - tl.dot(rounded, tl.trans(read), input_precision=precision)
            left = (new * lasts[None, :]).to(key.dtype)
            state = tl.dot(left, key, state * whole, input_precision=precision)
            seen = tl.dot(rounded, tl.trans(query), input_precision=precision) * remains[None, :]
            seen = tl.dot(new.to(key.dtype), tl.trans(score), seen, input_precision=precision)
            # Loaded again: these masks would be kept in registers from one piece to the next.
            own_length, kept = tl.load(piece + 3 * number - 2), tl.load(piece + 3 * number - 1).to(tl.int64)
            in_values = (t < own_length)[:, None] & in_value
            tl.store(output + place * value_dim + of_values, tl.trans(seen).to(key.dtype), mask=in_values)
            if kept >= 0:
                tl.store(states + kept * state_stride + of_state, state, mask=in_state)
            # Known a piece ahead, so that loads of tiles do not wait for it. Carried as it was loaded: if it were
            # converted here, Triton 3.6 would not pipeline the loop, and say nothing.
            behind = piece + 3 * tl.where(number < num_pieces, number, 0)
            start, length = tl.load(behind), tl.load(behind + 1)
        tl.store(own, state, mask=in_state)
