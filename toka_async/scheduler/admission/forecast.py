"""The block forecast: the number of pages in use at every future step, given when each sequence will end.

Exact, and vectorised over sequences and steps: a sequence that decodes takes a page every `page_size` steps from its
first crossing on, so new pages are histograms summed with stride `page_size`, and ends are one more histogram. Knows
lengths and page counts, not how lengths were predicted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from toka_async.arrays import Float64, Int32, Int64


def forecast_own_pages(position: Int32, remaining: Int32, held: Int32, page_size: int, horizon: int) -> Int64:
    """Forecast the pages held by decoding sequences during each of the next `horizon` steps.

    Args:
        position: int32 [s]: position of the token that a sequence computes in step 0; a page is taken in the step that
            computes its first token.
        remaining: int32 [s], at least 1: steps that compute the sequence; its pages are free in the step after.
        held: int32 [s]: its own pages before step 0.

    Returns:
        int64 [horizon].
    """
    return _forecast_crossings((-position) % page_size, remaining, held, page_size, horizon)


def forecast_window_pages(
    position: Int32, remaining: Int32, num_shared: Int32, window: int, page_size: int, horizon: int
) -> Int64:
    """Forecast the window pages that decoding sequences hold alone during each of the next `horizon` steps.

    Arguments and result are those of `forecast_own_pages`; num_shared: leading pages that are the prompt's. window:
    tokens that a token sees.
    """
    first = np.maximum(np.maximum(position - window + 1, 0) // page_size, num_shared)  # the first place that it holds
    held = np.maximum(-(-position // page_size) - first, 0)
    passes = (first + 1) * page_size + window - 1 - position  # the step before which it is dropped
    whole = forecast_own_pages(position, remaining, held, page_size, horizon)
    dropped: Int64 = _forecast_crossings(passes, remaining, np.zeros_like(held), page_size, horizon)
    return whole - dropped


def _forecast_crossings(first: Int32, remaining: Int32, held: Int32, page_size: int, horizon: int) -> Int64:
    """Forecast a number that grows by one in step `first`, and in every `page_size`th step after it, until the end."""
    span = (horizon // page_size + 1) * page_size
    crosses = first < remaining
    count = np.where(crosses, (remaining - 1 - first) // page_size + 1, 0)
    missed = first + count * page_size  # the first crossing that does not happen
    new = np.bincount(first[crosses], minlength=page_size + span)[:span]
    new = new - np.bincount(np.minimum(missed[crosses], span), minlength=span + 1)[:span]
    grown = new.reshape(-1, page_size).cumsum(axis=0).reshape(-1).cumsum()
    at_end = held + count
    freed = np.bincount(np.minimum(remaining, span), weights=at_end, minlength=span + 1)[:span]
    usage: Int64 = int(held.sum()) + grown - freed.cumsum().astype(np.int64)
    return usage[:horizon]


def forecast_shared_pages(ends: Int32, counts: Int32, horizon: int) -> Int64:
    """Forecast pages held until given steps, int64 [horizon]: counts[i] pages in all steps before ends[i]."""
    freed = np.bincount(np.minimum(ends, horizon), weights=counts, minlength=horizon + 1)[:horizon]
    usage: Int64 = int(counts.sum()) - freed.cumsum().astype(np.int64)
    return usage


def count_last_uses(pages: Int32, ends: Int32, num_pages: int) -> tuple[Int32, Int32]:
    """Count pages that several prompts share once: each until the last of its users ends.

    Args:
        pages: int32 [p], with repeats: the pages of all prompts, one prompt after the other.
        ends: int32 [p]: the step before which the page's prompt is in use.
        num_pages: size of the cache.

    Returns:
        Distinct ends and the number of pages for each, both int32.
    """
    order = np.argsort(ends, kind="stable")
    pages, ends = pages[order], ends[order]
    places = np.arange(pages.size, dtype=np.int32)
    last = np.empty(num_pages, np.int32)  # only entries of `pages` are written and read
    last[pages] = places  # the last assignment of a repeated page stays: its latest end
    ends = ends[last[pages] == places]
    first = np.flatnonzero(np.diff(ends, prepend=-1))
    return ends[first], np.diff(first, append=ends.size).astype(np.int32)


@dataclass(slots=True, eq=False)
class Profile:
    """Pages of one candidate at each step from its start on, float64 [steps], and their maximum."""

    pages: Float64
    peak: float


def sample_evenly(curve: UsageCurve, most: int) -> tuple[int, ...]:
    """At most `most` numbers of a curve at evenly spaced steps, and the number after its last step."""
    num_parts = min(most, curve.curve.size)
    steps = np.linspace(0, curve.curve.size, num_parts + 1).astype(np.int64)
    return tuple(np.append(curve.curve, curve.rest)[steps].round().astype(np.int64).tolist())


class UsageCurve:
    """A forecast to which candidates are added one after the other.

    Adding is put off until the curve is needed: it is not while the sum of all peaks is below the limit.

    Args:
        curve: float64 [horizon]: expected pages in use at each future step.
        rest: pages in use ever after.
    """

    def __init__(self, curve: Float64, rest: float = 0.0) -> None:
        self._curve = curve
        self.rest = rest
        self._later: Counter[Profile] = Counter()
        self._most = self._peak()  # an upper bound for every step, with what was put off

    @property
    def curve(self) -> Float64:
        """The curve with all that was added."""
        if self._later:
            later, self._later = self._later, Counter()
            for profile, count in later.items():
                self.add(profile.pages, count)
            self._most = self._peak()
        return self._curve

    def fits(self, profile: Profile, limit: int) -> bool:
        return self._most + profile.peak <= limit or self.count_that_fit(profile.pages, limit) > 0

    def put(self, profile: Profile) -> None:
        """Reserve for one more candidate."""
        self._later[profile] += 1
        self._most += profile.peak

    def count_that_fit(self, profile: Float64, limit: int) -> int:
        """Count the copies of `profile` (pages of one sample at each future step) that fit below `limit` pages."""
        curve = self.curve
        length = min(profile.size, curve.size)
        base, one = curve[:length], np.maximum(profile[:length], 1e-9)
        room = float(((limit - base) / one).min(initial=float(limit) * 1e9))
        beyond = float(profile[length:].max(initial=0.0))
        if beyond > 0:
            room = min(room, (limit - self.rest) / beyond)
        return max(0, int(min(room + 1e-6, 2**31)))

    def add(self, profile: Float64, count: int = 1) -> None:
        if profile.size > self._curve.size:
            longer = np.full(profile.size - self._curve.size, self.rest)
            self._curve = np.concatenate([self._curve, longer])
        self._curve[: profile.size] += count * profile
        self._most += count * float(profile.max(initial=0.0))

    def hold(self, num_pages: float) -> None:
        """Reserve pages for all steps."""
        self._curve += num_pages
        self.rest += num_pages
        self._most += num_pages

    def copy(self) -> UsageCurve:
        return UsageCurve(self.curve.copy(), self.rest)

    def _peak(self) -> float:
        return max(self.rest, float(self._curve.max(initial=0.0)))
