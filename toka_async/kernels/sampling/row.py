"""Reads one row's logits for the sampling kernels: as a draw sees them, in order, inverted, with random numbers.

Masks are read where logits are: ids that a row's mask forbids have -inf, whatever is stored for them.

A row is read in lines of LINE ids (128 bytes of bfloat16). Weights are exp((logit - the row's largest) / temperature),
float32; sums that a draw depends on are float64.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Flags of a row, as in `model.sampling.Flag`.
RANDOM = tl.constexpr(1)
FILTERED = tl.constexpr(2)
BIASED = tl.constexpr(4)
MIN_TOKENS = tl.constexpr(8)
REPETITION = tl.constexpr(16)
COUNTED = tl.constexpr(32)
LOGPROBS = tl.constexpr(64)
SCALED = tl.constexpr(512)
KEPT = tl.constexpr(1024)
MASKED = tl.constexpr(4096)
RAW = tl.constexpr(256)  # of kernels alone: log-probs need a pass before edits
TOP = tl.constexpr(2048)  # of kernels alone: the likeliest tokens are found after edits

LINE = tl.constexpr(64)  # two words of seen bits
SMALLEST = tl.constexpr(-3.4028234663852886e38)  # float32
LARGEST = tl.constexpr(3.4028234663852886e38)
LOG2E = tl.constexpr(1.4426950408889634)
INF = tl.constexpr(float("inf"))
KEY_OF_MINUS_INF = tl.constexpr(-2139095041)
NO_KEY = tl.constexpr(-(2**31))  # below the keys of all numbers
LAST_KEY = tl.constexpr(2**31 - 1)

# Fields of `stats` float32 [num_rows, NUM_STATS, num_chunks]: a row's sums over each chunk of ids.
MAX = tl.constexpr(0)
SUM = tl.constexpr(1)  # weights relative to the chunk's largest logit
SUM_ABOVE = tl.constexpr(2)  # the weights of logits >= the upper pilot bound
SUM_WITHIN = tl.constexpr(3)  # the weights of logits >= the lower bound
# Of log-probs for which MAX and SUM will not do: before penalties, or after them where a row is SCALED.
# They follow each other as MAX and SUM do.
RAW_MAX = tl.constexpr(4)  # the largest logit
RAW_SUM = tl.constexpr(5)  # weights before temperature
NUM_STATS = tl.constexpr(6)


@triton.jit
def clean(x, largest: tl.constexpr):
    """Returns float32 logits with -inf for NaN and `largest` (the dtype's largest number) for +inf."""
    return tl.minimum(tl.where(x == x, x, -INF), largest)


@triton.jit
def penalise(x, seen, repetition):
    """Divides positive logits of seen ids by the repetition penalty and multiplies negative ones."""
    factor = tl.where(x > 0, 1.0 / repetition, repetition)
    return tl.minimum(tl.where(seen != 0, x * factor, x), LARGEST)


@triton.jit  # noqa: RET503 - Triton's functions cannot say that they return None
def mask_of(masks_at, slot, flags, stride: tl.constexpr):
    """Returns what the readers of a row take as its `mask`: where its words begin, and whether it has any; or None.

    masks: int32 [num_slots, stride], a bit for each id that a slot's row may draw, lowest first; None: no row has one.
    """
    if masks_at is not None:
        return masks_at + slot * stride, (flags & MASKED) != 0


@triton.jit
def read_words(mask, starts, vocab: tl.constexpr):
    """Reads the two words, int32 [n] each, of a mask for lines that start at `starts` [n]; 0 past the vocabulary.

    All ids of a row without a mask are allowed, and nothing is read for it.
    """
    words_at, masked = mask
    other = tl.where(masked, 0, -1)
    low = tl.load(words_at + starts // 32, mask=masked & (starts < vocab), other=other)
    high = tl.load(words_at + starts // 32 + 1, mask=masked & (starts + 32 < vocab), other=other)
    return low, high


@triton.jit
def load_allowed(logits_at, starts, low, high, vocab: tl.constexpr):
    """Loads logits [n, LINE] of lines with these words of a mask; -inf where a word allows nothing.

    Such words' logits are not read. With a condition of each id, a thread could not read several ids at once.
    """
    column = tl.arange(0, LINE)[None, :]
    ids = starts[:, None] + column
    words = tl.where(column < 32, low[:, None], high[:, None])
    return tl.load(logits_at + ids, mask=(ids < vocab) & (words != 0), other=-INF)


@triton.jit
def forbid(x, low, high, masked):
    """Returns logits, float32 [n, LINE], with -inf where these words of a mask have no bit."""
    if masked:
        column = tl.arange(0, LINE)[None, :]
        words = tl.where(column < 32, low[:, None], high[:, None])
        # In two steps: the ids that a thread reads at once then differ in constants alone.
        allowed = (words >> (column & 28)) & (1 << (column & 3))
        x = tl.where(allowed != 0, x, -INF)
    return x


@triton.jit
def read_lines(logits_at, seen_at, starts, penalised, repetition, mask, vocab: tl.constexpr, largest: tl.constexpr):
    """Reads ids, int32, and logits, float32, [n, LINE] of lines that start at `starts` [n]; -inf past the
    vocabulary, and for ids that the row's mask forbids."""
    column = tl.arange(0, LINE)[None, :]
    ids = starts[:, None] + column
    if mask is None:
        x = tl.load(logits_at + ids, mask=ids < vocab, other=-INF).to(tl.float32)
    else:
        low, high = read_words(mask, starts, vocab)
        x = load_allowed(logits_at, starts, low, high, vocab).to(tl.float32)
        x = forbid(x, low, high, mask[1])
    x = clean(x, largest)
    if penalised:
        low = tl.load(seen_at + starts // 32, mask=starts < vocab, other=0)
        high = tl.load(seen_at + starts // 32 + 1, mask=starts + 32 < vocab, other=0)
        words = tl.where(column < 32, low[:, None], high[:, None])
        x = penalise(x, (words >> (column & 31)) & 1, repetition)
    return ids, x


@triton.jit
def read_one(logits_at, seen_at, token, penalised, repetition, mask, largest: tl.constexpr):
    """Reads the logit of one token id below the vocabulary's size; -inf if the row's mask forbids it."""
    x = clean(tl.load(logits_at + token).to(tl.float32), largest)
    if mask is not None:
        words_at, masked = mask
        word = tl.load(words_at + token // 32, mask=masked, other=-1)
        x = tl.where(((word >> (token & 31)) & 1) != 0, x, -INF)
    if penalised:
        x = penalise(x, (tl.load(seen_at + token // 32) >> (token & 31)) & 1, repetition)
    return x


@triton.jit
def read_output(page_table_at, history_at, place, within, page_size: tl.constexpr):
    """Reads the token ids at places [n] of a row, int32."""
    pages = tl.load(page_table_at + place // page_size, mask=within, other=0).to(tl.int64)
    return tl.load(history_at + pages * page_size + place % page_size, mask=within, other=0)


@triton.jit
def scale_of(temperature):
    """Returns the factor of logits for exp2; finite also for temperature 0, which has no weights."""
    return tl.minimum(LOG2E / tl.maximum(temperature, 1e-30), 1e30)


@triton.jit
def weigh(x, top, scale):
    """Returns exp((x - top) / temperature); 0 for -inf, also where `top` is -inf."""
    return tl.exp2((x - tl.maximum(top, SMALLEST)) * scale)


@triton.jit
def chunk_stats(stats_at, field: tl.constexpr, other, num_chunks: tl.constexpr, padded: tl.constexpr):
    """Reads one field of a row's stats, float32 [padded]."""
    chunk = tl.arange(0, padded)
    return tl.load(stats_at + field * num_chunks + chunk, mask=chunk < num_chunks, other=other)


@triton.jit
def chunk_masses(stats_at, field: tl.constexpr, maxima, top, scale, num_chunks: tl.constexpr, padded: tl.constexpr):
    """Returns the chunks' sums as weights relative to `top`, the row's largest logit: float64 [padded]."""
    sums = chunk_stats(stats_at, field, 0.0, num_chunks, padded)
    return (sums * weigh(maxima, top, scale)).to(tl.float64)


@triton.jit
def key_of(x):
    """Returns integers in the order of float32 numbers, equal where the numbers are."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    """Inverts `key_of`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def halfway(low, high):
    """Returns the mean of two int32, rounded down, without overflow."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def nth_largest(keys, num, low, high):
    """Returns a bound with `num` of the keys at or above it, or the largest key that more reach.

    low, high: keys with at least and with fewer than `num` at or above them.
    """
    count = num + 1
    while (low + 1 < high) & (count != num):
        middle = halfway(low, high)
        count = tl.sum((keys >= middle).to(tl.int32))
        low = tl.where(count >= num, middle, low)
        high = tl.where(count >= num, high, middle)
    return low


@triton.jit
def invert(weights, share):
    """Returns the first index where the running sum of float64 weights [n] exceeds `share` of the total.

    The index has a positive weight if there is one. Also returns where the target lies in it, as a share of its
    weight.
    """
    num: tl.constexpr = weights.shape[0]
    index = tl.arange(0, num)
    running = tl.cumsum(weights, 0)
    target = share * tl.max(running, 0)
    positive = weights > 0
    first = tl.min(tl.where((running > target) & positive, index, num), 0)
    last = tl.max(tl.where(positive, index, 0), 0)
    chosen = tl.where(first < num, first, last)
    size = tl.sum(tl.where(index == chosen, weights, 0.0), 0)
    before = tl.sum(tl.where(index == chosen, running, 0.0), 0) - size
    inner = tl.maximum((target - before) / tl.where(size > 0, size, 1.0), 0.0)
    return chosen, inner


@triton.jit
def invert_lines(weights, share):
    """Inverts float32 weights [n, LINE] in the order of lines; returns the line's index, and the index in it."""
    lines = tl.arange(0, weights.shape[0])
    line, inner = invert(tl.sum(weights.to(tl.float64), axis=1), share)
    chosen = tl.sum(tl.where(lines[:, None] == line, weights, 0.0), axis=0)
    column, _ = invert(chosen.to(tl.float64), inner)
    return line, column


@triton.jit
def mix(z):
    """Computes SplitMix64's finaliser of a uint64."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def random_bits(seed, index):
    """Returns 64 random bits, number `index` (uint64) of a seed's stream (int64), as in `model.rng`."""
    return mix(mix(seed.to(tl.uint64, bitcast=True)) + (index + 1) * 0x9E3779B97F4A7C15)


@triton.jit
def uniform_of(bits):
    """Returns a float64 in [0, 1) of 53 of the bits."""
    return (bits >> 11).to(tl.float64) * 1.1102230246251565e-16
