"""The length predictor: estimates lengths of sequences from those that ended and those that still run.

Lengths are fractions of max_tokens, in bins. The estimate is Kaplan and Meier's (1958) product of per-bin survival,
since running sequences say as much as ended ones: counting ends alone would favour short ones. Old evidence decays, so
that the estimate follows the workload. Samples of one prompt (a group) inform each other beyond what all requests say:
bin by bin, and by ending faster or slower than all (gamma frailty, Vaupel et al. 1979), which shows early. Knows
numbers of tokens only: no pages, no steps.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from toka_async.arrays import Float64, Int32

NUM_BINS = 256
PRIOR_HAZARD = 4.0 / NUM_BINS  # in each bin, without any evidence: a quarter of max_tokens, on average
PRIOR_WEIGHT = 4.0  # the broader estimate counts as this many observations, in each bin
FRAILTY = 16.0  # ends after which a group's being slower or faster than everyone is believed by half
MEMORY = 4096.0  # ended sequences after which the evidence about all requests has faded to 1/e
EVERYONE = 0  # the group of all sequences
MAX_GROUPS = 128


def find_bins(tokens: Int32, max_tokens: Int32) -> Int32:
    """Find the bin of each length, int32 [s]; reaching max_tokens is beyond the last bin."""
    return np.minimum(tokens.astype(np.int64) * NUM_BINS // np.maximum(max_tokens, 1), NUM_BINS).astype(np.int32)


class LengthPredictor:
    """Evidence and estimates by group; group 0 is everyone.

    `curves` [groups, NUM_BINS + 1]: the share of a group's sequences that reaches each bin; the last entry is the share
    that reaches max_tokens. Current as of the last `update`.
    """

    def __init__(self) -> None:
        self._ends: Float64 = np.zeros((1, NUM_BINS))
        self._exposed: Float64 = np.zeros((1, NUM_BINS))
        self._free: list[int] = []
        self.curves: Float64 = (1.0 - PRIOR_HAZARD) ** np.arange(NUM_BINS + 1.0)[None, :]
        self._keys = _make_search_keys(self.curves)

    def open_group(self) -> int:
        """Open a group for the samples of one prompt; returns EVERYONE when there are too many groups."""
        if self._free:
            group = self._free.pop()
            self.curves[group] = self.curves[EVERYONE]
            self._keys = _make_search_keys(self.curves)
            return group
        if len(self._ends) == MAX_GROUPS:
            return EVERYONE
        blank = np.zeros((1, NUM_BINS))
        self._ends, self._exposed = np.concatenate([self._ends, blank]), np.concatenate([self._exposed, blank])
        self.curves = np.concatenate([self.curves, self.curves[:1]])
        self._keys = _make_search_keys(self.curves)
        return len(self._ends) - 1

    def close_group(self, group: int) -> None:
        """Forget the group of a request that has ended; what everyone learned from it stays."""
        if group != EVERYONE:
            self._ends[group] = self._exposed[group] = 0.0
            self._free.append(group)

    def observe(self, groups: Int32, tokens: Int32, max_tokens: Int32, by_length: npt.NDArray[np.bool_]) -> None:
        """Learn from sequences that ended with `tokens`; `by_length`: because they reached max_tokens."""
        ended_in = np.where(by_length, NUM_BINS, np.minimum(find_bins(tokens - 1, max_tokens), NUM_BINS - 1))
        fade = np.exp(-groups.size / MEMORY)
        self._ends[EVERYONE] *= fade
        self._exposed[EVERYONE] *= fade
        own = groups != EVERYONE
        for of, bins in ((np.zeros_like(groups), ended_in), (groups[own], ended_in[own])):
            counts = _count(of, bins, len(self._ends))
            self._ends += counts[:, :NUM_BINS]
            self._exposed += counts[:, ::-1].cumsum(axis=1)[:, ::-1][:, :NUM_BINS]

    def update(self, groups: Int32, tokens: Int32, max_tokens: Int32) -> None:
        """Estimate anew with the sequences that run now: they survived the bins before theirs."""
        bins = find_bins(tokens, max_tokens)
        counts = _count(groups, bins, len(self._ends))
        counts[EVERYONE] = counts.sum(axis=0)
        survived = counts[:, ::-1].cumsum(axis=1)[:, ::-1][:, 1:]
        known = self._exposed[EVERYONE] + survived[EVERYONE]
        everyone = (self._ends[EVERYONE] + PRIOR_WEIGHT * PRIOR_HAZARD) / (known + PRIOR_WEIGHT)
        exposed = self._exposed + survived
        frailty = (self._ends.sum(axis=1) + FRAILTY) / (exposed @ everyone + FRAILTY)
        broader = -np.expm1(frailty[:, None] * np.log1p(-np.minimum(everyone, 1.0 - 1e-9)))
        hazards = (self._ends + PRIOR_WEIGHT * broader) / (exposed + PRIOR_WEIGHT)
        hazards[EVERYONE] = everyone
        self.curves = np.concatenate([np.ones((len(hazards), 1)), np.cumprod(1.0 - hazards, axis=1)], axis=1)
        self._keys = _make_search_keys(self.curves)

    def predict_lengths(self, groups: Int32, generated: Int32, max_tokens: Int32, ranks: Float64) -> Int32:
        """Predict the length of each sequence as the `rank` quantile of those that got as far as it did.

        With ranks spread evenly over (0, 1), the lengths of many sequences follow the whole distribution, tail
        included, which a mean for each would not.

        Args:
            groups, generated (tokens so far), max_tokens: int32 [s]. ranks: float64 [s] in (0, 1).

        Returns:
            int32 [s], above `generated` and at most max_tokens.
        """
        place = generated * (NUM_BINS / np.maximum(max_tokens, 1))
        whole = np.minimum(place.astype(np.int64), NUM_BINS - 1)
        inside = np.minimum(place - whole, 1.0)
        alive = self.curves[groups, whole] * (1 - inside) + self.curves[groups, whole + 1] * inside
        target = alive * (1.0 - ranks)
        # The first bin edge that fewer than `target` reach, interpolated within the bin before it.
        edge = np.searchsorted(self._keys, 2.0 * groups + 1.0 - target, side="right") - groups * (NUM_BINS + 1)
        last = edge > NUM_BINS
        edge = np.clip(edge, 1, NUM_BINS)
        upper, lower = self.curves[groups, edge - 1], self.curves[groups, edge]
        part = np.clip((upper - target) / np.maximum(upper - lower, 1e-300), 0.0, 1.0)
        bins = np.where(last, NUM_BINS, edge - 1 + part)
        lengths = np.ceil(bins * max_tokens / NUM_BINS).astype(np.int64)
        return np.clip(lengths, np.minimum(generated + 1, max_tokens), max_tokens).astype(np.int32)

    def predict_survival(self, group: int, max_tokens: int) -> Float64:
        """The share of a group's new sequences that computes its token i, for i < max_tokens."""
        places = np.arange(max_tokens) * (NUM_BINS / max_tokens)
        alive: Float64 = np.interp(places, np.arange(NUM_BINS + 1), self.curves[group])
        return alive

    def mean_and_spread(self, group: int) -> tuple[float, float]:
        """Mean and standard deviation of a group's lengths, as fractions of max_tokens."""
        middle = (self.curves[group, :-1] + self.curves[group, 1:]) / 2
        mean = float(middle.mean())
        second = float((2 * (np.arange(NUM_BINS) + 0.5) / NUM_BINS * middle).mean())
        return mean, float(np.sqrt(max(0.0, second - mean * mean)))


def _count(groups: Int32, bins: Int32, num_groups: int) -> Float64:
    """Count the sequences of each group in each bin, [groups, NUM_BINS + 1]."""
    width = NUM_BINS + 1
    flat = np.bincount(groups * width + bins, minlength=num_groups * width)
    return flat.reshape(num_groups, width).astype(np.float64)


def _make_search_keys(curves: Float64) -> Float64:
    """Join all curves into one ascending array: each group's falling shares, inverted, in its own interval."""
    keys: Float64 = (2.0 * np.arange(len(curves))[:, None] + 1.0 - curves).reshape(-1)
    return keys
