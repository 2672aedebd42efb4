"""The pass over all logits, each read once: sums and maxima of chunks, and before it the pilot that tells what to sum.

For a row with a top_p the pilot estimates from a few lines, spread over the vocabulary, two bounds on the smallest
logit of the nucleus. Summed exactly in the pass, the weights above each bound settle almost every draw of a flat
distribution without another pass; wrong estimates cost time and change no result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from toka_async.kernels.sampling_row import (
    FILTERED,
    INF,
    LINE,
    LOG2E,
    LOGPROBS,
    MAX,
    NUM_STATS,
    RANDOM,
    RAW_MAX,
    RAW_SUM,
    REPETITION,
    SUM,
    SUM_ABOVE,
    SUM_WITHIN,
    clean,
    penalise,
    read_lines,
    scale_of,
    weigh,
)

# The bounds lie this share of top_p * (1 - top_p) above and below top_p: four standard deviations of the estimate for
# normal logits (standard deviation 1.5 after temperature) from 4,096 of them.
_MARGIN = tl.constexpr(0.2)
_REACH = tl.constexpr(30.0)  # bounds are looked for down to exp(-30) of the largest weight
_STEPS = tl.constexpr(13)


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
    bounds_at,
    vocab: tl.constexpr,
    stride: tl.constexpr,
    seen_stride: tl.constexpr,
    num_lines: tl.constexpr,
    pilot_lines: tl.constexpr,
    num_candidates: tl.constexpr,
    largest: tl.constexpr,
):
    """One program a row: the upper and the lower bound, float32 [row, 2]; +inf where there are none."""
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
            vocab,
            largest,
        )
        scale = scale_of(tl.load(temperature_at + slot))
        top = tl.max(x)
        weights = weigh(x, top, scale)
        total = tl.sum(weights)
        # Where few tokens weigh enough, the candidates will do.
        share: tl.constexpr = max(1.0, num_lines / pilot_lines)
        if num_candidates < top_p * total * share:
            upper, lower = _bounds(x, weights, top, scale, top_p, total)
    tl.store(bounds_at + row * 2, upper)
    tl.store(bounds_at + row * 2 + 1, lower)


@triton.jit
def _bounds(x, weights, top, scale, top_p, total):
    """Logits with a little less and a little more than top_p of the total at and above them."""
    margin = _MARGIN * top_p * (1 - top_p)
    less = (top_p - margin) * total
    more = (top_p + margin) * total
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


@triton.jit(do_not_specialize_on_alignment=["slots_at"])
def chunk_sums(
    logits_at,
    slots_at,
    flags_at,
    temperature_at,
    repetition_at,
    seen_at,
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
    """One program a row and chunk: its `stats`, and what the row needs of its lines, float32 [row, num_lines].

    maxima: for greedy and for filtered rows. sums: of weights of the chunk's largest logit, for random rows; of those
    of logits >= the lower bound where the row has one.
    """
    row = tl.program_id(0).to(tl.int64) // num_chunks
    chunk = tl.program_id(0) % num_chunks
    line = chunk * chunk_lines + tl.arange(0, chunk_lines)
    column = tl.arange(0, LINE)[None, :]
    ids = (line * LINE)[:, None] + column
    # The logits are asked for first, so that the row's parameters arrive meanwhile.
    loaded = tl.load(logits_at + row * stride + ids, mask=ids < vocab, other=-INF)
    slot = tl.load(slots_at + row)
    flags = tl.load(flags_at + slot)
    temperature = tl.load(temperature_at + slot)
    x = clean(loaded.to(tl.float32), largest)
    at = stats_at + row * (NUM_STATS * num_chunks) + chunk
    as_it_is = ((flags & RANDOM) != 0) & ((flags & REPETITION) == 0) & (temperature == 1.0)
    if ((flags & LOGPROBS) != 0) & (as_it_is == 0):
        raw_top = tl.max(x)
        tl.store(at + RAW_MAX * num_chunks, raw_top)
        tl.store(at + RAW_SUM * num_chunks, tl.sum(weigh(x, raw_top, LOG2E)))
    if (flags & REPETITION) != 0:
        words_at = seen_at + slot * seen_stride + line * (LINE // 32)
        low = tl.load(words_at, mask=line * LINE < vocab, other=0)
        high = tl.load(words_at + 1, mask=line * LINE + 32 < vocab, other=0)
        words = tl.where(column < 32, low[:, None], high[:, None])
        x = penalise(x, (words >> (column & 31)) & 1, tl.load(repetition_at + slot))
    maxima = tl.max(x, axis=1)
    top = tl.max(maxima, axis=0)
    tl.store(at + MAX * num_chunks, top)
    if ((flags & FILTERED) != 0) | ((flags & RANDOM) == 0):
        tl.store(maxima_at + row * num_lines + line, maxima, mask=line < num_lines)
    if (flags & RANDOM) != 0:
        weights = weigh(x, top, scale_of(temperature))
        lower = tl.load(bounds_at + row * 2 + 1)
        if lower < INF:
            total = tl.sum(weights)
            upper = tl.load(bounds_at + row * 2)
            tl.store(at + SUM_ABOVE * num_chunks, tl.sum(tl.where(x >= upper, weights, 0.0)))
            sums = tl.sum(tl.where(x >= lower, weights, 0.0), axis=1)
            tl.store(at + SUM_WITHIN * num_chunks, tl.sum(sums, axis=0))
        else:
            sums = tl.sum(weights, axis=1)
            total = tl.sum(sums, axis=0)
        tl.store(sums_at + row * num_lines + line, sums, mask=line < num_lines)
        tl.store(at + SUM * num_chunks, total)
        if ((flags & LOGPROBS) != 0) & as_it_is:
            tl.store(at + RAW_MAX * num_chunks, top)
            tl.store(at + RAW_SUM * num_chunks, total)
