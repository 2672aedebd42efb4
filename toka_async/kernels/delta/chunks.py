"""The gated delta rule for chunks of prompts, by pieces of some tokens (arXiv:2412.06464, section 3.3).

Within a piece each token's value depends on those before it by a triangular system. A first kernel solves it for all
pieces at once, as far as it does not depend on the state; a second one takes the states of chunks through their pieces.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from toka_async.kernels.delta.layer import DeltaShape, DeltaWeights, Programs, StepChunks
from toka_async.kernels.delta.step import load_rates
from toka_async.kernels.launches.sizes import divide_up, round_to_power

_BLOCKS = 4  # of a piece, whose systems are solved row by row; the rest is products
_VALUES = 32  # of a head, whose states one program takes through the pieces
_SOLVING = 1  # programs of a multiprocessor, beside which those of decoding rows run
_CHUNKS = 16  # programs that keep chunks' newest inputs, for each part of the channels
_TOKENS_BESIDE = 4096  # of a step with decoding rows, for each program that reads: more would take rows' registers
_REGISTERS = 168  # of a thread that solves 16-bit values, so that three programs fit a multiprocessor


def count_piece_tokens(dtype: torch.dtype) -> int:
    """Counts the tokens of a piece: as many as a GPU's registers hold."""
    return 32 if dtype == torch.float32 else 64


def count_programs(num_tokens: int, heads: int, device: torch.device) -> Programs:
    """Counts programs for any step of so many tokens that has decoding rows as well.

    Few programs take many pieces and chunks, so that they leave room for those of rows, which would wait for them all.
    """
    of_pieces = num_tokens  # at most
    if not has_tensor_memory(device):  # which does not hold what a loop over pieces keeps there
        of_pieces = max(1, _SOLVING * _count_processors(device) // heads)
    readers = max(1, round(num_tokens / _TOKENS_BESIDE))
    return Programs(min(num_tokens, of_pieces), min(num_tokens, _CHUNKS), min(num_tokens, readers))


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
    key_pad, value_pad = (max(16, round_to_power(dim)) for dim in (shape.key_dim, shape.value_dim))
    dims = {
        "key_heads": shape.num_key_heads,
        "value_heads": heads,
        "key_dim": shape.key_dim,
        "value_dim": shape.value_dim,
        "key_pad": key_pad,
        "tokens": count_piece_tokens(convolved.dtype),
        "precision": "tf32x3" if convolved.dtype == torch.float32 else "tf32",
    }
    decays = torch.empty(num_tokens, heads, dtype=torch.float32, device=convolved.device)
    of_pieces = chunks.counts, chunks.pieces
    solved = learned, reads, decays
    _solve[chunks.programs.pieces, heads](
        convolved,
        gates,
        gates.stride(0),
        weights.log_decay,
        weights.time_bias,
        *of_pieces,
        *solved,
        value_pad=value_pad,
        count=_BLOCKS,
        takes_several=3 * chunks.programs.pieces < len(chunks.pieces),
        num_warps=8 if convolved.dtype == torch.float32 else 4,
        maxnreg=None if convolved.dtype == torch.float32 else _REGISTERS,
        **dims,
    )
    values = min(_VALUES // 2 if convolved.dtype == torch.float32 else _VALUES, value_pad)
    _read[chunks.programs.readers, heads, divide_up(shape.value_dim, values)](
        convolved,
        states,
        states.stride(0),
        *of_pieces,
        chunks.chunks,
        *solved,
        output,
        values=values,
        num_warps=8 if convolved.dtype == torch.float32 else 4,
        num_stages=2,
        **dims,
    )
    return output


@triton.jit
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
    decays,
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

    takes_several: there may be more pieces than programs.
    """
    if takes_several:
        # Hoisting out of the loop what does not change would take more registers than there are.
        for number in tl.range(tl.program_id(0), tl.load(counts), tl.num_programs(0), num_stages=1, disable_licm=True):
            _solve_piece(
                convolved,
                gates,
                gate_stride,
                log_decay,
                time_bias,
                pieces + 3 * number,
                learned,
                reads,
                decays,
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
    elif tl.program_id(0) < tl.load(counts):
        _solve_piece(
            convolved,
            gates,
            gate_stride,
            log_decay,
            time_bias,
            pieces + 3 * tl.program_id(0),
            learned,
            reads,
            decays,
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
    decays,
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
    head, t, i, j = tl.program_id(1), tl.arange(0, tokens), tl.arange(0, key_pad), tl.arange(0, value_pad)
    num_channels: tl.constexpr = 2 * key_heads * key_dim + value_heads * value_dim
    of_key = (key_heads + head // (value_heads // key_heads)) * key_dim + i
    of_value = 2 * key_heads * key_dim + head * value_dim + j
    is_before = t[:, None] > t[None, :]
    first, length = tl.load(piece), tl.load(piece + 1)
    inside = t < length
    token = (first + tl.where(inside, t, 0)).to(tl.int64)
    in_keys, in_values = inside[:, None] & (i < key_dim)[None, :], inside[:, None] & (j < value_dim)[None, :]
    key = tl.load(convolved + token[:, None] * num_channels + of_key[None, :], mask=in_keys, other=0.0)
    beta, decay = load_rates(gates + token * gate_stride, log_decay, time_bias, head, value_heads)
    beta, total = tl.where(inside, beta, 0.0), tl.cumsum(tl.where(inside, decay, 0.0), 0)
    tl.store(decays + token * value_heads + head, total, mask=inside)
    remains = tl.exp(tl.where(is_before, total[:, None] - total[None, :], 0.0))
    system = tl.dot(key, tl.trans(key), input_precision=precision) * remains * beta[:, None]
    inverse = _invert(tl.where(is_before, system, 0.0), tokens, count, precision) * beta[None, :]
    place = (token * value_heads + head)[:, None]
    of_keys = (inverse * tl.exp(total)[None, :]).to(key.dtype)
    solved_keys = tl.dot(of_keys, key, input_precision=precision)
    tl.store(reads + place * key_dim + i[None, :], solved_keys.to(key.dtype), mask=in_keys)
    value = tl.load(convolved + token[:, None] * num_channels + of_value[None, :], mask=in_values, other=0.0)
    solved = tl.dot(inverse.to(key.dtype), value, input_precision=precision)
    tl.store(learned + place * value_dim + j[None, :], solved.to(key.dtype), mask=in_values)


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


@triton.jit
def _read(
    convolved,
    states,
    state_stride,
    counts,
    pieces,
    chunks,
    learned,
    reads,
    decays,
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
    """One program takes some values of a head's state through chunks."""
    head, t, i = tl.program_id(1), tl.arange(0, tokens), tl.arange(0, key_pad)
    j = tl.program_id(2) * values + tl.arange(0, values)
    in_state = (i < key_dim)[:, None] & (j < value_dim)[None, :]
    of_state = states + head * key_dim * value_dim + i[:, None] * value_dim + j[None, :]
    num_channels: tl.constexpr = 2 * key_heads * key_dim + value_heads * value_dim
    of_head = head // (value_heads // key_heads) * key_dim + i
    for of_step in tl.range(tl.program_id(0), tl.load(counts + 1), tl.num_programs(0), num_stages=1):
        chunk = chunks + 3 * of_step
        first_piece, num_pieces, slot = tl.load(chunk), tl.load(chunk + 1), tl.load(chunk + 2).to(tl.int64)
        state = tl.load(of_state + slot * state_stride, mask=in_state, other=0.0).to(tl.float32)
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
            total = tl.load(decays + token * value_heads + head, mask=inside, other=0.0)
            last = tl.sum(tl.where(t == length - 1, total, 0.0), 0)
            rounded = state.to(key.dtype)
            new = value - tl.dot(read, rounded, input_precision=precision)
            is_seen = t[:, None] >= t[None, :]
            remains = tl.where(is_seen, tl.exp(tl.where(is_seen, total[:, None] - total[None, :], 0.0)), 0.0)
            scores = (tl.dot(query, tl.trans(key), input_precision=precision) * remains).to(key.dtype)
            seen = tl.dot(query, rounded, input_precision=precision) * tl.exp(total)[:, None]
            seen += tl.dot(scores, new.to(key.dtype), input_precision=precision)
            tl.store(output + place * value_dim + j[None, :], seen.to(key.dtype), mask=in_values)
            # Scaled on this side of the product, where there are fewer values, and keys need not leave shared memory.
            left = (new * tl.where(inside, tl.exp(last - total), 0.0)[:, None]).to(key.dtype)
            state = state * tl.exp(last) + tl.dot(tl.trans(key), left, input_precision=precision)
            if kept >= 0:
                target = states + kept * state_stride + head * key_dim * value_dim
                _store_halves(target, state, tl.program_id(2) * values, key_dim, value_dim, key_pad, values)
        tl.store(of_state + slot * state_stride, state, mask=in_state)


@triton.jit
def _store_halves(
    target,
    state,
    first,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    key_pad: tl.constexpr,
    values: tl.constexpr,
):
    """Stores the columns from `first` on of a head's state, half by half: what is rearranged needs shared memory.

    Pieces are loaded ahead into the rest of it, so that two programs just fit a multiprocessor.
    """
    half: tl.constexpr = values // 2
    i, j = tl.arange(0, key_pad), first + tl.arange(0, half)
    low, high = tl.split(tl.permute(tl.reshape(state, (key_pad, 2, half)), (0, 2, 1)))
    place = target + i[:, None] * value_dim + j[None, :]
    tl.store(place, low, mask=(i < key_dim)[:, None] & (j < value_dim)[None, :])
    tl.store(place + half, high, mask=(i < key_dim)[:, None] & (j + half < value_dim)[None, :])
