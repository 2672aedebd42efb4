"""Reads all logits once for sums and maxima of chunks; before that, the pilot decides what to sum.

For a row with a top_p the pilot estimates from a few lines, spread over the vocabulary, two bounds on the smallest
logit of the nucleus. Summed exactly in the pass, the weights above each bound settle almost every draw of a flat
distribution without another pass; wrong estimates cost time and change no result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from toka_async.kernels.launches.quick import launch_quickly
from toka_async.kernels.sampling.row import (
    FILTERED,
    INF,
    LARGEST,
    LINE,
    LOG2E,
    LOGPROBS,
    MAX,
    NUM_STATS,
    RANDOM,
    RAW_MAX,
    RAW_SUM,
    REPETITION,
    SCALED,
    SMALLEST,
    SUM,
    SUM_ABOVE,
    SUM_WITHIN,
    chunk_stats,
    clean,
    forbid,
    load_allowed,
    mask_of,
    penalise,
    read_lines,
    read_words,
    scale_of,
    weigh,
)

# The share of weight that an estimated bound cuts off is wrong by about top_p * (1 - top_p) / sqrt(n), where n is the
# effective number of tokens in the pilot, (sum of weights)**2 / sum of squares: the bounds lie four times that apart
# from top_p. With fewer tokens than these they would settle little.
_MARGIN = tl.constexpr(4.0)
_FEWEST = tl.constexpr(32.0)
_REACH = tl.constexpr(30.0)  # bounds lie above exp(-30) of the largest weight
_STEPS = tl.constexpr(12)
_MOST_SHIFT = tl.constexpr(4096.0)


@launch_quickly
@triton.jit(do_not_specialize_on_alignment=["slots_at"])
def pilot(
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
    bounds_at,
    vocab: tl.constexpr,
    stride: tl.constexpr,
    seen_stride: tl.constexpr,
    num_lines: tl.constexpr,
    pilot_lines: tl.constexpr,
    num_candidates: tl.constexpr,
    largest: tl.constexpr,
):
    """One program stores a row's upper and lower bound, float32 [row, 2]; +inf where there are none."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_at + row)
    flags = tl.load(flags_at + slot)
    upper = tl.full((), INF, tl.float32)
    lower = tl.full((), INF, tl.float32)
    top_p = tl.load(top_p_at + slot)
    only_top_p = (top_p < 1) & (tl.load(min_p_at + slot) == 0) & (tl.load(top_k_at + slot) == 0)
    if ((flags & FILTERED) != 0) & only_top_p:
        line = tl.arange(0, pilot_lines)
        starts = (line if num_lines <= pilot_lines else line * num_lines // pilot_lines) * LINE
        penalised = (flags & REPETITION) != 0
        _, x = read_lines(
            logits_at + row * stride,
            seen_at + slot * seen_stride,
            starts,
            penalised,
            tl.load(repetition_at + slot),
            mask_of(masks_at, slot, flags, seen_stride),
            vocab,
            largest,
        )
        scale = scale_of(tl.load(temperature_at + slot))
        top = tl.max(x)
        weights = weigh(x, top, scale)
        total = tl.sum(weights)
        # Where few tokens weigh enough, the candidates suffice.
        share: tl.constexpr = max(1.0, num_lines / pilot_lines)
        num_tokens = total * total / tl.maximum(tl.sum(weights * weights), 1e-30)
        if (num_candidates < top_p * total * share) & (num_tokens >= _FEWEST):
            margin = _MARGIN / tl.sqrt(num_tokens) * top_p * (1 - top_p)
            upper, lower = _bounds(x, weights, top, scale, (top_p - margin) * total, (top_p + margin) * total)
    tl.store(bounds_at + row * 2, upper)
    tl.store(bounds_at + row * 2 + 1, lower)


@triton.jit
def _bounds(x, weights, top, scale, less, more):
    """Returns logits with at most `less` and at least `more` of weight at and above them, where they exist."""
    lowest = top - _REACH * LOG2E / scale
    upper_low = lowest
    upper = top
    lower = lowest
    lower_high = top
    for _ in range(_STEPS):
        middle = 0.5 * (upper_low + upper)
        below = tl.sum(tl.where(x >= middle, weights, 0.0)) <= less
        upper = tl.where(below, middle, upper)
        upper_low = tl.where(below, upper_low, middle)
        middle = 0.5 * (lower + lower_high)
        enough = tl.sum(tl.where(x >= middle, weights, 0.0)) >= more
        lower = tl.where(enough, middle, lower)
        lower_high = tl.where(enough, lower_high, middle)
    return upper, lower


@launch_quickly
@triton.jit(do_not_specialize_on_alignment=["slots_at"])
def chunk_sums(
    logits_at,
    slots_at,
    flags_at,
    temperature_at,
    repetition_at,
    seen_at,
    masks_at,
    bounds_at,
    stats_at,
    maxima_at,
    sums_at,
    vocab: tl.constexpr,
    stride: tl.constexpr,
    seen_stride: tl.constexpr,
    num_lines: tl.constexpr,
    num_chunks: tl.constexpr,
    chunk_lines: tl.constexpr,
    largest: tl.constexpr,
):
    """One program stores the `stats` of a row and chunk, and what the row needs of its lines, float32 [row, num_lines].

    maxima: for greedy and for filtered rows. sums: for random rows, weights relative to the chunk's largest logit; only
    of logits >= the lower bound where the row has one. Logits are not cleaned; see `repair`.
    """
    row = tl.program_id(0).to(tl.int64) // num_chunks
    chunk = tl.program_id(0) % num_chunks
    _sum_chunk(
        row,
        chunk,
        logits_at + row * stride,
        slots_at,
        flags_at,
        temperature_at,
        repetition_at,
        seen_at,
        masks_at,
        bounds_at + row * 2,
        stats_at + row * (NUM_STATS * num_chunks),
        maxima_at + row * num_lines,
        sums_at + row * num_lines,
        vocab,
        seen_stride,
        num_lines,
        num_chunks,
        chunk_lines,
        False,
        largest,
    )


@launch_quickly
@triton.jit(do_not_specialize_on_alignment=["slots_at"])
def repair(
    logits_at,
    slots_at,
    flags_at,
    temperature_at,
    repetition_at,
    seen_at,
    masks_at,
    bounds_at,
    stats_at,
    maxima_at,
    sums_at,
    vocab: tl.constexpr,
    stride: tl.constexpr,
    seen_stride: tl.constexpr,
    num_lines: tl.constexpr,
    num_chunks: tl.constexpr,
    padded_chunks: tl.constexpr,
    chunk_lines: tl.constexpr,
    largest: tl.constexpr,
):
    """One program repeats `chunk_sums` with cleaned logits for a row whose sums show NaN or infinity.

    Cleaning all logits would make `chunk_sums` a third slower.
    """
    row = tl.program_id(0).to(tl.int64)
    flags = tl.load(flags_at + tl.load(slots_at + row))
    row_stats_at = stats_at + row * (NUM_STATS * num_chunks)
    top = chunk_stats(row_stats_at, MAX, 0.0, num_chunks, padded_chunks)
    odd = (top >= LARGEST) | (top != top)
    if (flags & RANDOM) != 0:
        total = chunk_stats(row_stats_at, SUM, 0.0, num_chunks, padded_chunks)
        odd = odd | (total != total)
    if ((flags & LOGPROBS) != 0) & (((flags & SCALED) == 0) | ((flags & RANDOM) == 0)):
        top = chunk_stats(row_stats_at, RAW_MAX, 0.0, num_chunks, padded_chunks)
        total = chunk_stats(row_stats_at, RAW_SUM, 0.0, num_chunks, padded_chunks)
        odd = odd | (top >= LARGEST) | (total != total)
    if tl.max(odd.to(tl.int32), 0) > 0:
        for chunk in range(num_chunks):
            _sum_chunk(
                row,
                chunk,
                logits_at + row * stride,
                slots_at,
                flags_at,
                temperature_at,
                repetition_at,
                seen_at,
                masks_at,
                bounds_at + row * 2,
                row_stats_at,
                maxima_at + row * num_lines,
                sums_at + row * num_lines,
                vocab,
                seen_stride,
                num_lines,
                num_chunks,
                chunk_lines,
                True,
                largest,
            )


@triton.jit
def _sum_chunk(
    row,
    chunk,
    logits_at,
    slots_at,
    flags_at,
    temperature_at,
    repetition_at,
    seen_at,
    masks_at,
    bounds_at,
    stats_at,
    maxima_at,
    sums_at,
    vocab: tl.constexpr,
    seen_stride: tl.constexpr,
    num_lines: tl.constexpr,
    num_chunks: tl.constexpr,
    chunk_lines: tl.constexpr,
    cleaned: tl.constexpr,
    largest: tl.constexpr,
):
    line = chunk * chunk_lines + tl.arange(0, chunk_lines)
    if masks_at is None:
        column = tl.arange(0, LINE)[None, :]
        ids = (line * LINE)[:, None] + column
        # Loading the logits first lets the row's parameters arrive meanwhile.
        loaded = tl.load(logits_at + ids, mask=ids < vocab, other=-INF)
        slot = tl.load(slots_at + row)
        _store_sums(
            loaded,
            chunk,
            line,
            slot,
            tl.load(flags_at + slot),
            temperature_at,
            repetition_at,
            seen_at,
            bounds_at,
            stats_at,
            maxima_at,
            sums_at,
            vocab,
            seen_stride,
            num_lines,
            num_chunks,
            cleaned,
            largest,
        )
    else:
        slot = tl.load(slots_at + row)
        flags = tl.load(flags_at + slot)
        mask = mask_of(masks_at, slot, flags, seen_stride)
        low, high = read_words(mask, line * LINE, vocab)
        # Schemas often allow few ids: logits of other words are not read, and chunks without any are not computed. All
        # are asked for before that is known, so that they arrive meanwhile.
        loaded = load_allowed(logits_at, line * LINE, low, high, vocab)
        some = tl.full((), 1, tl.int32)
        if mask[1]:
            some = tl.max(((low | high) != 0).to(tl.int32), 0)
        if some > 0:
            _store_sums(
                forbid(loaded.to(tl.float32), low, high, mask[1]),
                chunk,
                line,
                slot,
                flags,
                temperature_at,
                repetition_at,
                seen_at,
                bounds_at,
                stats_at,
                maxima_at,
                sums_at,
                vocab,
                seen_stride,
                num_lines,
                num_chunks,
                cleaned,
                largest,
            )
        else:
            _store_nothing(line, stats_at + chunk, maxima_at, sums_at, num_lines, num_chunks)


@triton.jit
def _store_sums(
    logits,
    chunk,
    line,
    slot,
    flags,
    temperature_at,
    repetition_at,
    seen_at,
    bounds_at,
    stats_at,
    maxima_at,
    sums_at,
    vocab: tl.constexpr,
    seen_stride: tl.constexpr,
    num_lines: tl.constexpr,
    num_chunks: tl.constexpr,
    cleaned: tl.constexpr,
    largest: tl.constexpr,
):
    """Stores the sums of a chunk's logits [chunk_lines, LINE]."""
    temperature = tl.load(temperature_at + slot)
    lower = tl.load(bounds_at + 1)
    stats_at += chunk
    x = logits.to(tl.float32)
    if cleaned:
        x = clean(x, largest)
    as_it_is = ((flags & RANDOM) != 0) & ((flags & REPETITION) == 0) & (temperature == 1.0)
    # Log-probs after temperature need the sums of the draw, which a greedy row has not.
    own_sums = ((flags & LOGPROBS) != 0) & (((flags & SCALED) == 0) | ((flags & RANDOM) == 0)) & (as_it_is == 0)
    after_penalty = (flags & (SCALED | REPETITION)) == (SCALED | REPETITION)
    if own_sums & (after_penalty == 0):
        _store_raw(stats_at, x, num_chunks)
    if (flags & REPETITION) != 0:
        words_at = seen_at + slot * seen_stride + line * (LINE // 32)
        low = tl.load(words_at, mask=line * LINE < vocab, other=0)
        high = tl.load(words_at + 1, mask=line * LINE + 32 < vocab, other=0)
        column = tl.arange(0, LINE)[None, :]
        words = tl.where(column < 32, low[:, None], high[:, None])
        x = penalise(x, (words >> (column & 31)) & 1, tl.load(repetition_at + slot))
        if own_sums & after_penalty:
            _store_raw(stats_at, x, num_chunks)
    if ((flags & FILTERED) != 0) | ((flags & RANDOM) == 0):
        maxima = tl.max(x, axis=1)
        top = tl.max(maxima, axis=0)
        tl.store(maxima_at + line, maxima, mask=line < num_lines)
    else:
        top = tl.max(x)
    tl.store(stats_at + MAX * num_chunks, top)
    if (flags & RANDOM) != 0:
        weights, correction = _weigh(x, top, scale_of(temperature))
        if lower < INF:
            total = tl.sum(weights) * correction
            # Products are fast here: the chip compares to 1.0 or 0.0, and multiplies and adds, in one instruction each.
            above = tl.sum(tl.where(x >= tl.load(bounds_at), 1.0, 0.0) * weights) * correction
            sums = tl.sum(tl.where(x >= lower, 1.0, 0.0) * weights, axis=1)
            tl.store(stats_at + SUM_ABOVE * num_chunks, above)
            tl.store(stats_at + SUM_WITHIN * num_chunks, tl.sum(sums, axis=0) * correction)
        else:
            sums = tl.sum(weights, axis=1)
            total = tl.sum(sums, axis=0) * correction
        tl.store(sums_at + line, sums, mask=line < num_lines)
        tl.store(stats_at + SUM * num_chunks, total)
        if ((flags & LOGPROBS) != 0) & as_it_is:
            tl.store(stats_at + RAW_MAX * num_chunks, top)
            tl.store(stats_at + RAW_SUM * num_chunks, total)


@triton.jit
def _store_nothing(line, stats_at, maxima_at, sums_at, num_lines: tl.constexpr, num_chunks: tl.constexpr):
    """Stores what any row gets for a chunk without an allowed id: what `_store_sums` makes of -inf alone."""
    field = tl.arange(0, triton.next_power_of_2(NUM_STATS))
    values = tl.where((field == MAX) | (field == RAW_MAX), -INF, 0.0)
    tl.store(stats_at + field * num_chunks, values, mask=field < NUM_STATS)
    tl.store(maxima_at + line, tl.full(line.shape, -INF, tl.float32), mask=line < num_lines)
    tl.store(sums_at + line, tl.zeros(line.shape, tl.float32), mask=line < num_lines)


@triton.jit
def _store_raw(stats_at, x, num_chunks: tl.constexpr):
    top = tl.max(x)
    weights, correction = _weigh(x, top, LOG2E)
    tl.store(stats_at + RAW_MAX * num_chunks, top)
    tl.store(stats_at + RAW_SUM * num_chunks, tl.sum(weights) * correction)


@triton.jit
def _weigh(x, top, scale):
    """Returns exp2((x - top) * scale), one multiply-add each where that is accurate, and a correction of its sums."""
    shift = tl.maximum(top, SMALLEST) * scale
    correction = tl.full((), 1.0, tl.float32)
    if tl.abs(shift) < _MOST_SHIFT:
        weights = tl.exp2(tl.fma(x, scale, -shift))
        correction = tl.exp2(-tl.fma(top, scale, -shift))  # the product's rounding error
    else:
        weights = weigh(x, top, scale)
    return weights, correction
