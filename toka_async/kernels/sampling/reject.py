"""Settles filtered rows that one pass left open: exact rejection with pivots, one pass over the row each round.

A proposal is kept if the filters keep it; otherwise the next comes from the tokens before it in the ranking, which hold
all that are kept. That gives the exact distribution for any set that the first proposal came from, if it covers the
kept tokens (the idea of FlashInfer's sampling kernels). Later numbers are mixed from the first one's bits and the
round, so they depend on seed and index only.
"""

from __future__ import annotations

import triton
import triton.language as tl

from toka_async.kernels.launches.quick import launch_quickly
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
    mask_of,
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


@launch_quickly
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
    masks_at,
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
        mask = mask_of(masks_at, slot, flags, seen_stride)
        temperature = tl.load(temperature_at + slot)
        scale = scale_of(temperature)
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
            least = nth_largest_logit(
                logits_at, seen_at, penalised, repetition, mask, top, top_k, vocab, part_lines, num_parts, largest
            )
            most = top_k
        elif token < vocab:
            value = read_one(logits_at, seen_at, token, penalised, repetition, mask, largest)
        number = tl.zeros((), tl.int32)
        while number < _MOST_ROUNDS:
            kept, masses = _judge(
                logits_at,
                seen_at,
                penalised,
                repetition,
                mask,
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
                padded_parts,
                largest,
            )
            number += 1
            if kept:
                number = tl.full((), _MOST_ROUNDS, tl.int32)
            else:
                part, share = invert(masses, uniform_of(mix(bits + number.to(tl.uint64) * 0x9E3779B97F4A7C15)))
                ids, x = read_part(logits_at, seen_at, part, penalised, repetition, mask, vocab, part_lines, largest)
                weights = _keep_before(_weigh_allowed(x, top, scale, least, min_p), ids, x, token, value)
                line, column = invert_lines(weights, share)
                token = (part * part_lines + line) * LINE + column
                value = tl.sum(tl.where(ids == token, x, 0.0))
        token = tl.minimum(token, vocab - 1)
        finish(
            row,
            flags,
            temperature,
            repetition,
            logits_at,
            seen_at,
            mask,
            stats_at,
            token,
            chosen_at,
            logprobs_at,
            num_chunks,
            padded_chunks,
            largest,
        )


@triton.jit
def read_part(
    logits_at,
    seen_at,
    part,
    penalised,
    repetition,
    mask,
    vocab: tl.constexpr,
    part_lines: tl.constexpr,
    largest: tl.constexpr,
):
    """Reads ids and logits of a part of the row, [part_lines, LINE]."""
    starts = (part * part_lines + tl.arange(0, part_lines)) * LINE
    return read_lines(logits_at, seen_at, starts, penalised, repetition, mask, vocab, largest)


@triton.jit
def _judge(
    logits_at,
    seen_at,
    penalised,
    repetition,
    mask,
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
    padded_parts: tl.constexpr,
    largest: tl.constexpr,
):
    """Tells in one pass whether the filters keep a token of this logit, and sums what may be proposed instead.

    least: the smallest logit that top_k keeps; most: how many tokens. Also returns the weights of the allowed tokens
    before the token, float64 [padded_parts].
    """
    parts = tl.arange(0, padded_parts)
    masses = tl.zeros((padded_parts,), tl.float64)
    allowed_mass = tl.zeros((part_lines, LINE), tl.float32)
    num_allowed = tl.zeros((part_lines, LINE), tl.int32)
    num_before = tl.zeros((part_lines, LINE), tl.int32)
    for part in tl.range(0, num_parts, num_stages=3):
        ids, x = read_part(logits_at, seen_at, part, penalised, repetition, mask, vocab, part_lines, largest)
        allowed = _weigh_allowed(x, top, scale, least, min_p)
        before = _keep_before(allowed, ids, x, token, value)
        masses = tl.where(parts == part, tl.sum(before).to(tl.float64), masses)
        allowed_mass += allowed
        if most < vocab:
            num_allowed += (allowed > 0).to(tl.int32)
            num_before += (before > 0).to(tl.int32)
    # Only ties of the last token can exceed top_k.
    excess = tl.maximum(tl.sum(num_allowed) - most, 0) * weigh(least, top, scale).to(tl.float64)
    mass = tl.sum(allowed_mass.to(tl.float64)) - excess
    mass_before = tl.sum(masses, 0)
    in_nucleus = (mass_before == 0) | (top_p >= 1) | (mass_before < top_p * mass)
    weight = weigh(value, top, scale)
    return (value >= least) & (weight >= min_p) & (weight > 0) & (tl.sum(num_before) < most) & in_nucleus, masses


# With selections in place of logic: what a thread knows of its tokens must fit seven predicates.
@triton.jit
def _weigh_allowed(x, top, scale, least, min_p):
    """Returns the weights of the tokens that min_p and `least` allow, and 0 for others."""
    weights = tl.where(x >= least, weigh(x, top, scale), 0.0)
    return tl.where(weights >= min_p, weights, 0.0)


@triton.jit
def _keep_before(weights, ids, x, token, value):
    """Returns the weights of the tokens before one of logit `value`, and 0 for others."""
    above = value_of(key_of(value) + 1)  # the next number
    return tl.where(x >= tl.where(ids < token, value, above), weights, 0.0)


@triton.jit
def nth_largest_logit(
    logits_at,
    seen_at,
    penalised,
    repetition,
    mask,
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
            _, x = read_part(logits_at, seen_at, part, penalised, repetition, mask, vocab, part_lines, largest)
            reached += (x >= bound).to(tl.int32)
        count = tl.sum(reached)
        low = tl.where(count >= num, middle, low)
        high = tl.where(count >= num, high, middle)
    return value_of(low)
