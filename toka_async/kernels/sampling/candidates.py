"""Finds a filtered row's likeliest tokens through the maxima of its lines, and draws where they settle the row.

The n likeliest tokens lie in the n lines of the largest maxima, ties by lowest line: every other line has n maxima
before its own. All filters keep tokens down to some logit and the first few of those equal to it, so what a row keeps
is one bound on the logits and a number of ties. If that reaches beyond the candidates, they settle nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from toka_async.kernels.launches.quick import launch_quickly
from toka_async.kernels.sampling.row import (
    FILTERED,
    INF,
    KEY_OF_MINUS_INF,
    LAST_KEY,
    LINE,
    MAX,
    NO_KEY,
    NUM_STATS,
    REPETITION,
    SUM,
    chunk_masses,
    chunk_stats,
    halfway,
    invert,
    key_of,
    mask_of,
    nth_largest,
    read_lines,
    scale_of,
    value_of,
    weigh,
)

_PART = tl.constexpr(16)


@launch_quickly
@triton.jit(do_not_specialize_on_alignment=["slots_at"])
def gather(
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
    maxima_at,
    picks_at,
    num_sure_at,
    ids_at,
    values_at,
    vocab: tl.constexpr,
    stride: tl.constexpr,
    seen_stride: tl.constexpr,
    num_lines: tl.constexpr,
    padded_lines: tl.constexpr,
    num_chunks: tl.constexpr,
    padded_chunks: tl.constexpr,
    num_candidates: tl.constexpr,
    largest: tl.constexpr,
):
    """One program stores a row's candidates by ascending id, int32 and float32 [row, 2 * num_candidates].

    num_sure: int32 [row]; this many of the likeliest tokens are surely among them, 0 for rows without candidates; ids
    past the end are `vocab`. picks: int32 [row, num_candidates], workspace.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_at + row)
    flags = tl.load(flags_at + slot)
    num_sure = tl.zeros((), tl.int32)
    if (flags & FILTERED) != 0:
        top_k = tl.load(top_k_at + slot)
        at = stats_at + row * (NUM_STATS * num_chunks)
        maxima = chunk_stats(at, MAX, -INF, num_chunks, padded_chunks)
        top = tl.max(maxima, 0)
        scale = scale_of(tl.load(temperature_at + slot))
        total = tl.sum(chunk_masses(at, SUM, maxima, top, scale, num_chunks, padded_chunks), 0)
        # No token weighs more than 1, so the candidates of a flat distribution cannot reach top_p.
        only_top_p = (top_k == 0) & (tl.load(min_p_at + slot) == 0)
        flat = only_top_p & (num_candidates < tl.load(top_p_at + slot) * total)
        if (top > -INF) & (top_k <= num_candidates) & (flat == 0):
            capacity: tl.constexpr = 2 * num_candidates
            many: tl.constexpr = num_candidates if num_lines > num_candidates else min(vocab, capacity)
            num_sure = tl.minimum(tl.where(top_k > 0, top_k, many), vocab)
            num_picks = tl.minimum(num_sure, num_lines)
            lowest = pick_lines(
                maxima_at + row * num_lines,
                picks_at + row * num_candidates,
                num_picks,
                top,
                num_lines,
                padded_lines,
            )
            _store_candidates(
                logits_at + row * stride,
                seen_at + slot * seen_stride,
                (flags & REPETITION) != 0,
                tl.load(repetition_at + slot),
                mask_of(masks_at, slot, flags, seen_stride),
                picks_at + row * num_candidates,
                num_picks,
                num_sure,
                tl.where(num_sure > num_lines, KEY_OF_MINUS_INF, lowest),
                key_of(top) + 1,
                ids_at + row * capacity,
                values_at + row * capacity,
                vocab,
                num_lines,
                num_candidates,
                largest,
            )
    tl.store(num_sure_at + row, num_sure)


@triton.jit
def pick_lines(maxima_at, picks_at, num_picks, top, num_lines: tl.constexpr, padded_lines: tl.constexpr):
    """Stores the numbers of the lines of the largest maxima, ascending; returns a key that all these maxima reach."""
    line = tl.arange(0, padded_lines)
    inside = line < num_lines
    keys = tl.where(inside, key_of(tl.load(maxima_at + line, mask=inside, other=-INF)), NO_KEY)
    lowest = tl.min(tl.where(inside, keys, LAST_KEY), 0)
    bound = nth_largest(keys, num_picks, lowest, key_of(top) + 1)
    above = keys > bound
    tied = (keys == bound).to(tl.int32)
    first_ties = (tied != 0) & (tl.cumsum(tied, 0) - tied < num_picks - tl.sum(above.to(tl.int32), 0))
    taken = above | first_ties
    tl.store(picks_at + tl.cumsum(taken.to(tl.int32), 0) - 1, line, mask=taken)
    tl.debug_barrier()  # other threads read the picks than stored them
    return bound


@triton.jit
def _store_candidates(
    logits_at,
    seen_at,
    penalised,
    repetition,
    mask,
    picks_at,
    num_picks,
    num_sure,
    low,
    high,
    ids_at,
    values_at,
    vocab: tl.constexpr,
    num_lines: tl.constexpr,
    num_candidates: tl.constexpr,
    largest: tl.constexpr,
):
    """Stores the first `num_sure` tokens of the picked lines, and as many more as there is room for.

    low, high: keys with at least and with fewer than `num_sure` of the tokens at or above them. The lines are read in
    parts, from the cache after the first time: more at once would take too many registers.
    """
    capacity: tl.constexpr = 2 * num_candidates
    part: tl.constexpr = min(_PART, num_candidates)
    count = num_sure
    middle = low
    reached = capacity + 1
    while (low + 1 < high) & (reached > capacity):
        counts = tl.zeros((part, LINE), tl.int32)
        first = tl.zeros((), tl.int32)
        while first < num_picks:
            ids, keys, _ = _read_picked(
                logits_at,
                seen_at,
                penalised,
                repetition,
                mask,
                picks_at,
                first,
                num_picks,
                vocab,
                num_lines,
                part,
                largest,
            )
            counts += (keys >= middle).to(tl.int32)
            first += part
        count = tl.sum(counts)
        low = tl.where(count >= num_sure, middle, low)
        high = tl.where(count >= num_sure, high, middle)
        reached = tl.where(count >= num_sure, count, reached)
        middle = halfway(low, high)
    num_above = tl.zeros((), tl.int32)
    if reached > capacity:  # ties exceed it: count the others
        counts = tl.zeros((part, LINE), tl.int32)
        first = tl.zeros((), tl.int32)
        while first < num_picks:
            ids, keys, _ = _read_picked(
                logits_at,
                seen_at,
                penalised,
                repetition,
                mask,
                picks_at,
                first,
                num_picks,
                vocab,
                num_lines,
                part,
                largest,
            )
            counts += (keys > low).to(tl.int32)
            first += part
        num_above = tl.sum(counts)
    room = capacity - num_above
    num_ties = tl.zeros((), tl.int32)
    num_stored = tl.zeros((), tl.int32)
    first = tl.zeros((), tl.int32)
    while first < num_picks:
        ids, keys, x = _read_picked(
            logits_at, seen_at, penalised, repetition, mask, picks_at, first, num_picks, vocab, num_lines, part, largest
        )
        taken = keys >= low
        if reached > capacity:
            tied = keys == low
            taken = (keys > low) | (tied & (num_ties + _rank(tied) < room))
            num_ties += tl.sum(tied.to(tl.int32))
        place = num_stored + _rank(taken)
        tl.store(ids_at + place, ids, mask=taken)
        tl.store(values_at + place, x, mask=taken)
        num_stored += tl.sum(taken.to(tl.int32))
        first += part
    place = tl.arange(0, capacity)
    tl.store(ids_at + place, tl.full((capacity,), vocab, tl.int32), mask=place >= num_stored)


@triton.jit
def _read_picked(
    logits_at,
    seen_at,
    penalised,
    repetition,
    mask,
    picks_at,
    first,
    num_picks,
    vocab: tl.constexpr,
    num_lines: tl.constexpr,
    part: tl.constexpr,
    largest: tl.constexpr,
):
    """Returns ids, keys and logits of a part of the picked lines, [part, LINE]; NO_KEY past the end."""
    pick = first + tl.arange(0, part)
    starts = tl.load(picks_at + pick, mask=pick < num_picks, other=num_lines) * LINE
    ids, x = read_lines(logits_at, seen_at, starts, penalised, repetition, mask, vocab, largest)
    return ids, tl.where(ids < vocab, key_of(x), NO_KEY), x


@triton.jit
def _rank(chosen):
    """Counts the chosen ids before each one, in the order of lines: int32 [n, LINE]."""
    number = chosen.to(tl.int32)
    of_line = tl.sum(number, axis=1)
    return tl.cumsum(number, axis=1) - number + (tl.cumsum(of_line, 0) - of_line)[:, None]


@triton.jit
def draw_candidate(
    ids_at,
    values_at,
    num_sure,
    top,
    scale,
    total,
    top_p,
    min_p,
    top_k,
    uniform,
    vocab: tl.constexpr,
    num_candidates: tl.constexpr,
):
    """Draws the token, int32, of a row with candidates at `ids_at`; -1 where they do not decide it.

    top: the row's largest logit; total: the row's weight, float64; uniform: float64 in [0, 1).
    """
    index = tl.arange(0, 2 * num_candidates)
    ids = tl.load(ids_at + index)
    x = tl.load(values_at + index, mask=ids < vocab, other=-INF)
    keys = tl.where(ids < vocab, key_of(x), NO_KEY)
    weights = weigh(x, top, scale)
    kept, decided = find_kept(keys, weights, num_sure, num_sure == vocab, top, scale, total, top_p, min_p, top_k)
    chosen, _ = invert(tl.where(kept, weights, 0.0).to(tl.float64), uniform)
    return tl.where(decided, tl.sum(tl.where(index == chosen, ids, 0), 0), -1)


@triton.jit
def find_kept(keys, weights, num_sure, whole, top, scale, total, top_p, min_p, top_k):
    """Returns which of the candidates [n] are kept, and whether the row keeps no others.

    num_sure: this many of the likeliest tokens are among them; whole: all tokens are. total: the row's weight.
    """
    high = key_of(top) + 1
    bound = nth_largest(keys, num_sure, tl.min(tl.where(keys == NO_KEY, LAST_KEY, keys), 0), high)
    least = tl.min(tl.where((weights >= min_p) & (keys != NO_KEY), keys, LAST_KEY), 0)
    by_min_p = least > bound
    num_ties = tl.where(by_min_p, LAST_KEY, num_sure - tl.sum((keys > bound).to(tl.int32), 0))
    bound = tl.maximum(bound, least)
    ties = tl.minimum(tl.sum((keys == bound).to(tl.int32), 0), num_ties)
    bound_weight = weigh(value_of(bound), top, scale).to(tl.float64)
    mass = tl.sum(tl.where(keys > bound, weights, 0.0), 0).to(tl.float64) + ties * bound_weight
    sure = whole | (top_k > 0) | by_min_p
    decided = sure | ((min_p == 0) & (mass >= top_p * total))
    if top_p < 1:
        target = top_p * tl.where(sure, mass, total)
        last = _last_of_nucleus(keys, weights, target, bound, high)
        above = tl.sum(tl.where(keys > last, weights, 0.0), 0).to(tl.float64)
        weight = weigh(value_of(last), top, scale).to(tl.float64)
        reach = tl.ceil((target - above) / tl.where(weight > 0, weight, 1.0))
        most = tl.where(last == bound, num_ties, LAST_KEY)
        num_ties = tl.minimum(most, tl.maximum(tl.minimum(reach, 1e9), 1.0).to(tl.int32))
        bound = last
    tied = (keys == bound).to(tl.int32)
    return (keys > bound) | ((tied != 0) & (tl.cumsum(tied, 0) - tied < num_ties)), decided


@triton.jit
def _last_of_nucleus(keys, weights, target, low, high):
    """Returns the largest key with at least `target` of weight at or above it; low has that, high has not."""
    while low + 1 < high:
        middle = halfway(low, high)
        enough = tl.sum(tl.where(keys >= middle, weights, 0.0), 0).to(tl.float64) >= target
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low
