"""Settles filtered rows that one pass left open: exact rejection with pivots, a pass over the row each round.

A proposal is kept if the filters keep it; otherwise the next comes from the tokens before it in the ranking, which hold
all that are kept. That gives the exact distribution for any set that the first proposal came from, if it covers the
kept tokens (the idea of FlashInfer's sampling kernels). Later numbers are mixed from the first one's bits and the
round, so they depend on seed and index only.
"""

from __future__ import annotations

import triton
import triton.language as tl

from toka_async.kernels.sampling.draw import finish
from toka_async.kernels.sampling.row import (
    INF,
    KEY_OF_MINUS_INF,
    LINE,
    MAX,
    NUM_STATS,
    REPETITION,
    chunk_stats,
    halfway,
    invert,
    invert_lines,
    key_of,
    mix,
    random_bits,
    read_lines,
    read_one,
    scale_of,
    uniform_of,
    value_of,
    weigh,
)

# A round keeps a random part of the proposals, so no vocabulary needs more than 64 rounds.
_MOST_ROUNDS = tl.constexpr(64)


@triton.jit(do_not_specialize_on_alignment=["slots_at", "contexts_at"])
def reject(
    logits_at,
    slots_at,
    contexts_at,
    flags_at,
    temperature_at,
    top_p_at,
    min_p_at,
    top_k_at,
    repetition_at,
    num_prompt_at,
    seeds_at,
    seen_at,
    stats_at,
    proposals_at,
    chosen_at,
    logprobs_at,
    vocab: tl.constexpr,
    stride: tl.constexpr,
    seen_stride: tl.constexpr,
    num_chunks: tl.constexpr,
    padded_chunks: tl.constexpr,
    part_lines: tl.constexpr,
    num_parts: tl.constexpr,
    padded_parts: tl.constexpr,
    largest: tl.constexpr,
):
    """One program settles a row, in passes over parts of lines; a row whose token stands (proposal < 0) is done."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(proposals_at + row)
    if token >= 0:
        slot = tl.load(slots_at + row)
        flags = tl.load(flags_at + slot)
        logits_at += row * stride
        seen_at += slot * seen_stride
        stats_at += row * (NUM_STATS * num_chunks)
        penalised = (flags & REPETITION) != 0
        repetition = tl.load(repetition_at + slot)
        scale = scale_of(tl.load(temperature_at + slot))
        top_p = tl.load(top_p_at + slot)
        min_p = tl.load(min_p_at + slot)
        top_k = tl.load(top_k_at + slot)
        index = (tl.load(contexts_at + row) - tl.load(num_prompt_at + slot)).to(tl.uint64)
        bits = random_bits(tl.load(seeds_at + slot), index)
        top = tl.max(chunk_stats(stats_at, MAX, -INF, num_chunks, padded_chunks), 0)
        value = tl.full((), -INF, tl.float32)  # no proposal: all tokens are before it
        least = tl.full((), -INF, tl.float32)
        most = tl.full((), vocab, tl.int32)
        if top_k > 0:
            token = most
            least = _nth_largest(
                logits_at, seen_at, penalised, repetition, top, top_k, vocab, part_lines, num_parts, largest
            )
            most = top_k
        elif token < vocab:
            value = read_one(logits_at, seen_at, token, penalised, repetition, largest)
        number = tl.zeros((), tl.int32)
        while number < _MOST_ROUNDS:
            kept = _is_kept(
                logits_at,
                seen_at,
                penalised,
                repetition,
                token,
                value,
                top,
                scale,
                least,
                most,
                top_p,
                min_p,
                vocab,
                part_lines,
                num_parts,
                largest,
            )
            number += 1
            if kept:
                number = tl.full((), _MOST_ROUNDS, tl.int32)
            else:
                token, value = _propose(
                    logits_at,
                    seen_at,
                    penalised,
                    repetition,
                    token,
                    value,
                    top,
                    scale,
                    least,
                    min_p,
                    uniform_of(mix(bits + number.to(tl.uint64) * 0x9E3779B97F4A7C15)),
                    vocab,
                    part_lines,
                    num_parts,
                    padded_parts,
                    largest,
                )
        token = tl.minimum(token, vocab - 1)
        finish(
            row, flags, logits_at, seen_at, stats_at, token, chosen_at, logprobs_at, num_chunks, padded_chunks, largest
        )


@triton.jit
def _read_part(
    logits_at,
    seen_at,
    part,
    penalised,
    repetition,
    vocab: tl.constexpr,
    part_lines: tl.constexpr,
    largest: tl.constexpr,
):
    """Reads ids and logits of a part of the row, [part_lines, LINE]."""
    starts = (part * part_lines + tl.arange(0, part_lines)) * LINE
    return read_lines(logits_at, seen_at, starts, penalised, repetition, vocab, largest)


@triton.jit
def _is_kept(
    logits_at,
    seen_at,
    penalised,
    repetition,
    token,
    value,
    top,
    scale,
    least,
    most,
    top_p,
    min_p,
    vocab: tl.constexpr,
    part_lines: tl.constexpr,
    num_parts: tl.constexpr,
    largest: tl.constexpr,
):
    """Tells whether the filters keep a token of this logit, in one pass.

    least: the smallest logit that top_k keeps; most: how many tokens.
    """
    allowed_mass = tl.zeros((part_lines, LINE), tl.float32)
    num_allowed = tl.zeros((part_lines, LINE), tl.int32)
    before_mass = tl.zeros((part_lines, LINE), tl.float32)
    num_before = tl.zeros((part_lines, LINE), tl.int32)
    for part in tl.range(0, num_parts, num_stages=3):
        ids, x = _read_part(logits_at, seen_at, part, penalised, repetition, vocab, part_lines, largest)
        weights = weigh(x, top, scale)
        allowed = (x >= least) & (weights >= min_p) & (weights > 0)
        before = allowed & ((x > value) | ((x == value) & (ids < token)))
        allowed_mass += tl.where(allowed, weights, 0.0)
        num_allowed += allowed.to(tl.int32)
        before_mass += tl.where(before, weights, 0.0)
        num_before += before.to(tl.int32)
    rank = tl.sum(num_before)
    # Only ties of the last token can exceed top_k.
    excess = tl.maximum(tl.sum(num_allowed) - most, 0) * weigh(least, top, scale).to(tl.float64)
    mass = tl.sum(allowed_mass.to(tl.float64)) - excess
    in_nucleus = (rank == 0) | (top_p >= 1) | (tl.sum(before_mass.to(tl.float64)) < top_p * mass)
    weight = weigh(value, top, scale)
    return (value >= least) & (weight >= min_p) & (weight > 0) & (rank < most) & in_nucleus


@triton.jit
def _propose(
    logits_at,
    seen_at,
    penalised,
    repetition,
    token,
    value,
    top,
    scale,
    least,
    min_p,
    uniform,
    vocab: tl.constexpr,
    part_lines: tl.constexpr,
    num_parts: tl.constexpr,
    padded_parts: tl.constexpr,
    largest: tl.constexpr,
):
    """Draws a token before another one that min_p allows and that is >= least, in one pass; returns its logit too."""
    parts = tl.arange(0, padded_parts)
    masses = tl.zeros((padded_parts,), tl.float64)
    for part in range(num_parts):
        ids, x = _read_part(logits_at, seen_at, part, penalised, repetition, vocab, part_lines, largest)
        weights = _weights_before(ids, x, token, value, top, scale, least, min_p)
        masses = tl.where(parts == part, tl.sum(weights).to(tl.float64), masses)
    part, share = invert(masses, uniform)
    ids, x = _read_part(logits_at, seen_at, part, penalised, repetition, vocab, part_lines, largest)
    line, column = invert_lines(_weights_before(ids, x, token, value, top, scale, least, min_p), share)
    token = (part * part_lines + line) * LINE + column
    return token, tl.sum(tl.where(ids == token, x, 0.0))


@triton.jit
def _weights_before(ids, x, token, value, top, scale, least, min_p):
    weights = weigh(x, top, scale)
    before = (x >= least) & (weights >= min_p) & ((x > value) | ((x == value) & (ids < token)))
    return tl.where(before, weights, 0.0)


@triton.jit
def _nth_largest(
    logits_at,
    seen_at,
    penalised,
    repetition,
    top,
    num,
    vocab: tl.constexpr,
    part_lines: tl.constexpr,
    num_parts: tl.constexpr,
    largest: tl.constexpr,
):
    """Returns a bound with `num` of the row's logits at or above it, or the largest logit that more reach."""
    low = tl.full((), KEY_OF_MINUS_INF, tl.int32)
    high = key_of(top) + 1
    count = num + 1
    while (low + 1 < high) & (count != num):
        middle = halfway(low, high)
        bound = value_of(middle)
        reached = tl.zeros((part_lines, LINE), tl.int32)
        for part in range(num_parts):
            _, x = _read_part(logits_at, seen_at, part, penalised, repetition, vocab, part_lines, largest)
            reached += (x >= bound).to(tl.int32)
        count = tl.sum(reached)
        low = tl.where(count >= num, middle, low)
        high = tl.where(count >= num, high, middle)
    return value_of(low)
