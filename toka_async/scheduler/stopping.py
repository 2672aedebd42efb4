"""The stopping predictor: how long sequences will get, learned from those that ended and those that still run.

Lengths are fractions of max_tokens, in bins. The estimate is Kaplan and Meier's (1958) product of per-bin survival,
since running sequences say as much as ended ones: counting ends alone would favour short ones. Old evidence decays, so
that the estimate follows the workload; samples of one prompt inform each other beyond what all requests say. Knows
numbers of tokens only: no pages, no steps.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from toka_async.arrays import Int32

Float64 = npt.NDArray[np.float64]

NUM_BINS = 256
PRIOR_WEIGHT = 4.0  # how many observations the broader estimate counts for, in each bin
MEMORY = 4096.0  # ended sequences after which evidence has faded to 1/e


def bins_of(tokens: Int32, max_tokens: Int32) -> Int32:
    """The bin in which a sequence of that many tokens is, int32 [s]; reaching max_tokens is beyond the last bin."""
    return np.minimum(tokens.astype(np.int64) * NUM_BINS // np.maximum(max_tokens, 1), NUM_BINS).astype(np.int32)


class LengthEvidence:
    """Ends and survivals per bin, of ended sequences; a sequence at max_tokens survived every bin."""

    def __init__(self) -> None:
        self.ends: Float64 = np.zeros(NUM_BINS)
        self.exposed: Float64 = np.zeros(NUM_BINS)
        self.weight = 0.0

    def add(self, ended_in: Int32) -> None:
        """Sequences ended in these bins (NUM_BINS: at max_tokens)."""
        fade = np.exp(-ended_in.size / MEMORY)
        counts = np.bincount(ended_in, minlength=NUM_BINS + 1)
        reached = counts[::-1].cumsum()[::-1]
        self.ends = self.ends * fade + counts[:NUM_BINS]
        self.exposed = self.exposed * fade + reached[:NUM_BINS]
        self.weight = self.weight * fade + ended_in.size


def survival(evidence: LengthEvidence, running_in: Int32, prior: Float64 | None) -> Float64:
    """The share of sequences that get past each bin.

    Args:
        running_in: bins that running sequences are in: they survived the bins before.
        prior: hazards [NUM_BINS] to fall back on where evidence is thin; None: nobody ends before max_tokens.

    Returns:
        float64 [NUM_BINS + 1]: entry b is the share that reaches bin b (1 for bin 0); the last one reaches max_tokens.
    """
    return np.concatenate([[1.0], np.cumprod(1.0 - hazards(evidence, running_in, prior))])


def hazards(evidence: LengthEvidence, running_in: Int32, prior: Float64 | None) -> Float64:
    """The share of the sequences in each bin that end in it, [NUM_BINS]; arguments as for `survival`."""
    counts = np.bincount(running_in, minlength=NUM_BINS + 1)
    survived = counts[::-1].cumsum()[::-1][1:]  # entry b: running sequences that are past bin b
    base = np.zeros(NUM_BINS) if prior is None else prior
    share: Float64 = (evidence.ends + PRIOR_WEIGHT * base) / (evidence.exposed + survived + PRIOR_WEIGHT)
    return share


def quantile_lengths(curve: Float64, generated: Int32, max_tokens: Int32, rank: Float64) -> Int32:
    """The length at which each sequence ends if it is the `rank` quantile of those that got as far as it did.

    With ranks spread evenly over (0, 1) the lengths of many sequences follow the whole distribution, tail included,
    which a mean for each would not.

    Args:
        curve: `survival`.
        generated: int32 [s]: tokens so far. max_tokens: int32 [s]. rank: float64 [s].

    Returns:
        int32 [s], above `generated` and at most max_tokens.
    """
    place = generated * (NUM_BINS / np.maximum(max_tokens, 1))
    whole = np.minimum(place.astype(np.int64), NUM_BINS - 1)
    inside = np.minimum(place - whole, 1.0)
    alive = curve[whole] * (1 - inside) + curve[whole + 1] * inside
    target = alive * (1.0 - rank)
    # The first bin edge at which fewer survive than `target`, interpolated within the bin before it.
    edge = NUM_BINS + 1 - np.searchsorted(curve[::-1], target, side="left")
    edge = np.clip(edge, 1, NUM_BINS + 1)
    upper, lower = curve[edge - 1], curve[np.minimum(edge, NUM_BINS)]
    part = np.where(upper > lower, (upper - target) / np.maximum(upper - lower, 1e-300), 1.0)
    bins = np.where(edge > NUM_BINS, NUM_BINS, edge - 1 + np.clip(part, 0.0, 1.0))
    lengths = np.ceil(bins * max_tokens / NUM_BINS).astype(np.int64)
    return np.clip(lengths, np.minimum(generated + 1, max_tokens), max_tokens).astype(np.int32)


def mean_and_spread(curve: Float64) -> tuple[float, float]:
    """Mean and standard deviation of the length, as fractions of max_tokens."""
    middle = (curve[:-1] + curve[1:]) / 2
    mean = float(middle.mean())
    places = (np.arange(NUM_BINS) + 0.5) / NUM_BINS
    second = float((2 * places * middle).mean())
    return mean, float(np.sqrt(max(0.0, second - mean * mean)))
