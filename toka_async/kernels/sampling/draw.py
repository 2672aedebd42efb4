"""Draws each row from the sums of its chunks and lines, then stores the log-prob and the seen bit.

Greedy rows take the lowest id of the largest logit. Others choose a chunk by the chunks' sums, a line of it by the
lines' sums, then a token of the line, all with one uniform number. For a filtered row without a settled candidate that
token is a proposal: it stands where the pilot's bounds settle it, and goes to `reject` otherwise.
"""

from __future__ import annotations

import triton
import triton.language as tl

from toka_async.kernels.launches.quick import launch_quickly
from toka_async.kernels.sampling.candidates import draw_candidate
from toka_async.kernels.sampling.row import (
    FILTERED,
    INF,
    LINE,
    LOG2E,
    LOGPROBS,
    MAX,
    NUM_STATS,
    RANDOM,
    RAW_MAX,
    REPETITION,
    SCALED,
    SMALLEST,
    SUM,
    SUM_ABOVE,
    SUM_WITHIN,
    chunk_masses,
    chunk_stats,
    invert,
    mask_of,
    random_bits,
    read_lines,
    read_one,
    scale_of,
    uniform_of,
    weigh,
)


@launch_quickly
@triton.jit(do_not_specialize_on_alignment=["slots_at", "contexts_at"])
def draw(
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
    bounds_at,
    stats_at,
    maxima_at,
    sums_at,
    num_sure_at,
    ids_at,
    values_at,
    proposals_at,
    chosen_at,
    logprobs_at,
    vocab: tl.constexpr,
    stride: tl.constexpr,
    seen_stride: tl.constexpr,
    num_lines: tl.constexpr,
    num_chunks: tl.constexpr,
    padded_chunks: tl.constexpr,
    chunk_lines: tl.constexpr,
    num_candidates: tl.constexpr,
    largest: tl.constexpr,
):
    """One program draws a row's token id, int64 [row], and log-prob, float32 [row].

    proposals: int32 [row]; -1 where the token stands, otherwise the id that `reject` starts from, or `vocab` for
    none.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_at + row)
    flags = tl.load(flags_at + slot)
    temperature = tl.load(temperature_at + slot)
    logits_at += row * stride
    seen_at += slot * seen_stride
    stats_at += row * (NUM_STATS * num_chunks)
    penalised = (flags & REPETITION) != 0
    repetition = tl.load(repetition_at + slot)
    mask = mask_of(masks_at, slot, flags, seen_stride)
    maxima = chunk_stats(stats_at, MAX, -INF, num_chunks, padded_chunks)
    top = tl.max(maxima, 0)
    token = tl.full((), -1, tl.int32)
    stands = top == top  # true
    if ((flags & RANDOM) != 0) & (top > -INF):
        index = (tl.load(contexts_at + row) - tl.load(num_prompt_at + slot)).to(tl.uint64)
        uniform = uniform_of(random_bits(tl.load(seeds_at + slot), index))
        scale = scale_of(temperature)
        masses = chunk_masses(stats_at, SUM, maxima, top, scale, num_chunks, padded_chunks)
        lower = tl.full((), -INF, tl.float32)
        sure_above = tl.full((), -INF, tl.float32)
        possible = top == top
        if (flags & FILTERED) != 0:
            top_p = tl.load(top_p_at + slot)
            total = tl.sum(masses, 0)
            num_sure = tl.load(num_sure_at + row)
            if num_sure > 0:
                token = draw_candidate(
                    ids_at + row * (2 * num_candidates),
                    values_at + row * (2 * num_candidates),
                    num_sure,
                    top,
                    scale,
                    total,
                    top_p,
                    tl.load(min_p_at + slot),
                    tl.load(top_k_at + slot),
                    uniform,
                    vocab,
                    num_candidates,
                )
            sure_above = tl.full((), INF, tl.float32)
            bound = tl.load(bounds_at + row * 2 + 1)
            if bound < INF:
                masses = chunk_masses(stats_at, SUM_WITHIN, maxima, top, scale, num_chunks, padded_chunks)
                above = chunk_masses(stats_at, SUM_ABOVE, maxima, top, scale, num_chunks, padded_chunks)
                lower = bound
                possible = tl.sum(masses, 0) >= top_p * total  # else the nucleus reaches below the bound
                if tl.sum(above, 0) <= top_p * total:
                    sure_above = tl.load(bounds_at + row * 2)
        if token < 0:
            chunk, share = invert(masses, uniform)
            line = chunk * chunk_lines + tl.arange(0, chunk_lines)
            sums = tl.load(sums_at + row * num_lines + line, mask=line < num_lines, other=0.0)
            chosen, share = invert(sums.to(tl.float64), share)
            start = (chunk * chunk_lines + chosen) * LINE
            ids, x = _read_line(logits_at, seen_at, start, penalised, repetition, mask, vocab, largest)
            column, _ = invert(tl.where(x >= lower, weigh(x, top, scale), 0.0).to(tl.float64), share)
            token = tl.where(possible, start + column, vocab)
            stands = possible & (tl.sum(tl.where(ids == token, x, 0.0), 0) >= sure_above)
    else:
        chunks = tl.arange(0, padded_chunks)
        chunk = tl.min(tl.where(maxima == top, chunks, num_chunks - 1), 0)
        line = chunk * chunk_lines + tl.arange(0, chunk_lines)
        line_maxima = tl.load(maxima_at + row * num_lines + line, mask=line < num_lines, other=-INF)
        line = tl.min(tl.where(line_maxima == top, line, num_lines - 1), 0)
        ids, x = _read_line(logits_at, seen_at, line * LINE, penalised, repetition, mask, vocab, largest)
        token = tl.where(top > -INF, tl.min(tl.where(x == top, ids, vocab - 1), 0), 0)
    tl.store(proposals_at + row, tl.where(stands, -1, token))
    if stands:
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
def _read_line(logits_at, seen_at, start, penalised, repetition, mask, vocab: tl.constexpr, largest: tl.constexpr):
    """Reads ids and logits of a line, [LINE]."""
    ids, x = read_lines(
        logits_at, seen_at, tl.full((1,), 0, tl.int32) + start, penalised, repetition, mask, vocab, largest
    )
    return tl.reshape(ids, (LINE,)), tl.reshape(x, (LINE,))


@triton.jit
def finish(
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
    num_chunks: tl.constexpr,
    padded_chunks: tl.constexpr,
    largest: tl.constexpr,
):
    """Stores a row's token and what its flags ask for."""
    tl.store(chosen_at + row, token.to(tl.int64))
    logprob = tl.zeros((), tl.float32)
    if (flags & LOGPROBS) != 0:
        logprob = _find_logprob(
            flags,
            temperature,
            repetition,
            logits_at,
            seen_at,
            mask,
            stats_at,
            token,
            num_chunks,
            padded_chunks,
            largest,
        )
    tl.store(logprobs_at + row, logprob)
    if (flags & REPETITION) != 0:
        word_at = seen_at + token // 32
        tl.store(word_at, tl.load(word_at) | (1 << (token & 31)))


@triton.jit
def _find_logprob(
    flags,
    temperature,
    repetition,
    logits_at,
    seen_at,
    mask,
    stats_at,
    token,
    num_chunks: tl.constexpr,
    padded_chunks: tl.constexpr,
    largest: tl.constexpr,
):
    """Returns a token's log-prob in the softmax of the raw logits, or after penalties and temperature, by the flags.

    It is the smallest finite number for -inf or no token.
    """
    scaled = (flags & SCALED) != 0
    of_draw = scaled & ((flags & RANDOM) != 0)  # the sums of the draw are those of the log-probs
    stats_at += tl.where(of_draw, MAX, RAW_MAX) * num_chunks
    maxima = chunk_stats(stats_at, 0, -INF, num_chunks, padded_chunks)
    top = tl.maximum(tl.max(maxima, 0), SMALLEST)
    sums = chunk_stats(stats_at, 1, 0.0, num_chunks, padded_chunks)
    total = tl.sum(sums * weigh(maxima, top, tl.where(of_draw, scale_of(temperature), LOG2E)), 0)
    x = read_one(logits_at, seen_at, token, scaled & ((flags & REPETITION) != 0), repetition, mask, largest)
    above = x - top
    above = tl.where(of_draw, above / tl.maximum(temperature, 1e-30), above)
    return tl.maximum(above - tl.log(tl.maximum(total, 1e-30)), SMALLEST)
