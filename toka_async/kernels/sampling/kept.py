"""Measures what a row's filters keep: how many tokens, and which share of the distribution.

Rows that their candidates settle are measured by these. For others the smallest logit that is kept is found in passes
over the row. Runs on the sums and candidates of a draw, before it sets the seen bits of what it draws. Afterwards
`renormalize` changes the row's log-probs to those of what is kept.
"""

from __future__ import annotations

import triton
import triton.language as tl

from toka_async.kernels.launches.quick import launch_quickly
from toka_async.kernels.sampling.candidates import find_kept
from toka_async.kernels.sampling.reject import nth_largest_logit, read_part
from toka_async.kernels.sampling.row import (
    INF,
    KEPT,
    KEY_OF_MINUS_INF,
    LAST_KEY,
    LINE,
    MAX,
    NO_KEY,
    NUM_STATS,
    REPETITION,
    SMALLEST,
    SUM,
    chunk_masses,
    chunk_stats,
    halfway,
    key_of,
    mask_of,
    scale_of,
    value_of,
    weigh,
)


@launch_quickly
@triton.jit(do_not_specialize_on_alignment=["slots_at"])
def measure(
    logits_at,
    slots_at,
    flags_at,
    temperature_at,
    top_p_at,
    min_p_at,
    top_k_at,
    repetition_at,
    seen_at,
    masks_at,
    stats_at,
    num_sure_at,
    ids_at,
    values_at,
    kept_at,
    masses_at,
    vocab: tl.constexpr,
    stride: tl.constexpr,
    seen_stride: tl.constexpr,
    num_chunks: tl.constexpr,
    padded_chunks: tl.constexpr,
    part_lines: tl.constexpr,
    num_parts: tl.constexpr,
    num_candidates: tl.constexpr,
    largest: tl.constexpr,
):
    """One program stores a row's `kept`, int32, and `masses`, float32: 0 and 1 for rows that are not flagged KEPT."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_at + row)
    flags = tl.load(flags_at + slot)
    num_kept = tl.zeros((), tl.int32)
    share = tl.full((), 1.0, tl.float32)
    if (flags & KEPT) != 0:
        stats_at += row * (NUM_STATS * num_chunks)
        maxima = chunk_stats(stats_at, MAX, -INF, num_chunks, padded_chunks)
        top = tl.max(maxima, 0)
        if top > -INF:
            scale = scale_of(tl.load(temperature_at + slot))
            total = tl.sum(chunk_masses(stats_at, SUM, maxima, top, scale, num_chunks, padded_chunks), 0)
            top_p = tl.load(top_p_at + slot)
            min_p = tl.load(min_p_at + slot)
            top_k = tl.load(top_k_at + slot)
            num_sure = tl.load(num_sure_at + row)
            mass = tl.zeros((), tl.float64)
            decided = top != top  # false
            if num_sure > 0:
                index = tl.arange(0, 2 * num_candidates)
                ids = tl.load(ids_at + row * (2 * num_candidates) + index)
                x = tl.load(values_at + row * (2 * num_candidates) + index, mask=ids < vocab, other=-INF)
                keys = tl.where(ids < vocab, key_of(x), NO_KEY)
                weights = weigh(x, top, scale)
                kept, decided = find_kept(
                    keys, weights, num_sure, num_sure == vocab, top, scale, total, top_p, min_p, top_k
                )
                num_kept = tl.sum((kept & (weights > 0)).to(tl.int32), 0)
                mass = tl.sum(tl.where(kept, weights, 0.0).to(tl.float64), 0)
            if decided == 0:
                num_kept, mass = _measure_row(
                    logits_at + row * stride,
                    seen_at + slot * seen_stride,
                    (flags & REPETITION) != 0,
                    tl.load(repetition_at + slot),
                    mask_of(masks_at, slot, flags, seen_stride),
                    top,
                    scale,
                    top_p,
                    min_p,
                    top_k,
                    vocab,
                    part_lines,
                    num_parts,
                    largest,
                )
            share = tl.minimum((mass / total).to(tl.float32), 1.0)
    tl.store(kept_at + row, num_kept)
    tl.store(masses_at + row, share)


@launch_quickly
@triton.jit
def renormalize(kept_at, masses_at, logprobs_at, top_values_at, num_top: tl.constexpr, padded_top: tl.constexpr):
    """One program changes a row's log-probs to those of the tokens that `measure` has counted as kept, if it has.

    logprobs: of the drawn token. top_values: float32 [row, num_top], of the likeliest tokens, likeliest first, among
    which those that are kept come first.
    """
    row = tl.program_id(0).to(tl.int64)
    kept = tl.load(kept_at + row)
    if kept > 0:
        shift = tl.log(tl.load(masses_at + row))
        tl.store(logprobs_at + row, tl.load(logprobs_at + row) - shift)
        nth = tl.arange(0, padded_top)
        values_at = top_values_at + row * num_top + nth
        values = tl.load(values_at, mask=nth < num_top, other=0.0) - shift
        tl.store(values_at, tl.where(nth < kept, values, SMALLEST), mask=nth < num_top)


@triton.jit
def _measure_row(
    logits_at,
    seen_at,
    penalised,
    repetition,
    mask,
    top,
    scale,
    top_p,
    min_p,
    top_k,
    vocab: tl.constexpr,
    part_lines: tl.constexpr,
    num_parts: tl.constexpr,
    largest: tl.constexpr,
):
    """Returns how many tokens the filters keep, and their weight, float64: from passes over the whole row."""
    least = tl.full((), KEY_OF_MINUS_INF, tl.int32)
    most = tl.full((), vocab, tl.int32)
    if top_k > 0:
        bound = nth_largest_logit(
            logits_at, seen_at, penalised, repetition, mask, top, top_k, vocab, part_lines, num_parts, largest
        )
        least = key_of(bound)
        most = top_k
    count, mass, _, _ = _sum_from(
        logits_at, seen_at, penalised, repetition, mask, least, top, scale, min_p, vocab, part_lines, num_parts, largest
    )
    # Only ties of the last token can exceed top_k.
    ties = weigh(value_of(least), top, scale).to(tl.float64)
    mass -= tl.maximum(count - most, 0) * ties
    count = tl.minimum(count, most)
    if top_p < 1:
        target = top_p * mass
        # What reaches `least` has the target's weight, what reaches `high` has not. Each pass halves what is between
        # them, and goes on to the next logit that there is.
        high = key_of(top) + 1
        while least + 1 < high:
            middle = halfway(least, high)
            _, reached, above, below = _sum_from(
                logits_at,
                seen_at,
                penalised,
                repetition,
                mask,
                middle,
                top,
                scale,
                min_p,
                vocab,
                part_lines,
                num_parts,
                largest,
            )
            enough = reached >= target
            least = tl.where(enough, tl.maximum(middle, above), least)
            high = tl.where(enough, high, tl.minimum(middle, below + 1))
        count_above, mass_above, _, _ = _sum_from(
            logits_at,
            seen_at,
            penalised,
            repetition,
            mask,
            least + 1,
            top,
            scale,
            min_p,
            vocab,
            part_lines,
            num_parts,
            largest,
        )
        weight = weigh(value_of(least), top, scale).to(tl.float64)
        reach = tl.ceil((target - mass_above) / tl.where(weight > 0, weight, 1.0))
        num_ties = tl.maximum(tl.minimum(reach, 1e9), 1.0).to(tl.int32)
        num_ties = tl.minimum(num_ties, count - count_above)
        count = count_above + num_ties
        mass = mass_above + num_ties * weight
    return count, mass


@triton.jit
def _sum_from(
    logits_at,
    seen_at,
    penalised,
    repetition,
    mask,
    least,
    top,
    scale,
    min_p,
    vocab: tl.constexpr,
    part_lines: tl.constexpr,
    num_parts: tl.constexpr,
    largest: tl.constexpr,
):
    """Sums over tokens that min_p keeps and whose key is at least `least`.

    Returns their number, their weight, float64, the smallest of their keys, and the largest key below `least`.
    """
    count = tl.zeros((part_lines, LINE), tl.int32)
    mass = tl.zeros((part_lines, LINE), tl.float32)
    above = tl.full((part_lines, LINE), LAST_KEY, tl.int32)
    below = tl.full((part_lines, LINE), NO_KEY, tl.int32)
    for part in range(num_parts):
        ids, x = read_part(logits_at, seen_at, part, penalised, repetition, mask, vocab, part_lines, largest)
        keys = tl.where(ids < vocab, key_of(x), NO_KEY)
        weights = weigh(x, top, scale)
        chosen = (keys >= least) & (weights >= min_p) & (weights > 0)
        count += chosen.to(tl.int32)
        mass += tl.where(chosen, weights, 0.0)
        above = tl.where(chosen, tl.minimum(above, keys), above)
        below = tl.where(keys < least, tl.maximum(below, keys), below)
    return tl.sum(count), tl.sum(mass.to(tl.float64)), tl.min(above), tl.max(below)
