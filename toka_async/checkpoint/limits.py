"""Resolves `auto` in the limits of a run, and the number of pages that fit.

Free of torch, so that any process can ask. Knows configuration and the model's shape; measures nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Literal

from toka_async.checkpoint.spec import ModelError, ModelSpec
from toka_async.config import CacheConfig, ModelConfig, ScheduleConfig

DeviceKind = Literal["cpu", "cuda", "simulated"]

MAX_SEQS = {"cpu": 256, "cuda": 8192, "simulated": 8192}
MAX_TOKENS = {"cpu": 2048, "cuda": 32768, "simulated": 32768}
WINDOW_SHARE = 3 / 8  # of the cache's tokens, as many as layers with a window keep at least
LIKELY_CONTEXT = 1 / 4  # of the longest sequence, as long as one is taken to be


@dataclass(slots=True, frozen=True)
class RankLimits:
    """max_seqs: sequences that run at once. max_tokens: tokens of a step. max_context: tokens of a sequence."""

    max_seqs: int
    max_tokens: int
    max_context: int


def resolve_limits(model: ModelConfig, schedule: ScheduleConfig, spec: ModelSpec, device: DeviceKind) -> RankLimits:
    """Resolves every `auto`. Raises ModelError for impossible limits, such as a context above the model's.

    A step has at least one token for each sequence, so max_tokens is not below max_seqs. A simulated device has no
    positions, so its context is not limited.
    """
    max_seqs = MAX_SEQS[device] if schedule.max_seqs == "auto" else schedule.max_seqs
    max_tokens = max(MAX_TOKENS[device], max_seqs) if schedule.max_tokens == "auto" else schedule.max_tokens
    if schedule.max_seqs == "auto":
        max_seqs = min(max_seqs, max_tokens)
    max_context = spec.max_context if model.max_context == "auto" else model.max_context
    for name, value in (
        ("schedule.max_tokens", max_tokens),
        ("schedule.max_seqs", max_seqs),
        ("model.max_context", max_context),
    ):
        if value < 1:
            raise ModelError(f"{name}={value}: must be at least 1, or auto")
    if max_tokens < max_seqs:
        raise ModelError(f"schedule.max_tokens={max_tokens}: use at least schedule.max_seqs ({max_seqs}), or auto")
    if max_context > spec.max_context and device != "simulated":
        raise ModelError(
            f"model.max_context={max_context}: the model has {spec.max_context} positions; use at most that, or auto"
        )
    return RankLimits(max_seqs, max_tokens, max_context)


def resolve_num_snapshots(cache: CacheConfig, spec: ModelSpec, max_seqs: int) -> int:
    """Returns how many states are kept beside those of rows; 0 for a model without recurrent layers."""
    if not spec.recurrences:
        return 0
    return max(16, max_seqs // 4) if cache.num_snapshots == "auto" else cache.num_snapshots


@dataclass(slots=True, frozen=True)
class PageBytes:
    """What pages take over all layers of a rank. window_page: of a page of those with a window, which see `window`."""

    page: int
    window_page: int = 0
    window: int = 0

    def count(self, cache: CacheConfig, limits: RankLimits, num_pages: int) -> int:
        """Counts the bytes of so many pages and of the window pages that go with them."""
        num_window_pages = resolve_num_window_pages(cache, limits, self.window, num_pages)
        return num_pages * self.page + num_window_pages * self.window_page

    def count_fitting(self, cache: CacheConfig, limits: RankLimits, num_bytes: int) -> int:
        """Counts the pages that fit."""
        num_bytes = max(num_bytes, 0)
        numbers = range(num_bytes // self.page + 1)
        return bisect_right(numbers, num_bytes, key=lambda count: self.count(cache, limits, count)) - 1


def resolve_num_window_pages(cache: CacheConfig, limits: RankLimits, window: int, num_pages: int) -> int:
    """Returns the pages of layers that see `window` tokens, which are given back behind it; 0 without such layers.

    They suffice for max_seqs sequences and a step's prompts, or for sequences whose length is a quarter of max_context,
    or for three eighths of the tokens in the cache. A sequence must be able to run alone.
    """
    if not window:
        return 0
    of_sequence = window // cache.page_size + 4
    if cache.num_window_tokens == "auto":
        share = min(max(WINDOW_SHARE, window / (LIKELY_CONTEXT * limits.max_context)), 1.0)
        most = limits.max_seqs * of_sequence + -(-limits.max_tokens // cache.page_size)
        wanted = min(int(share * num_pages), most)
    else:
        wanted = cache.num_window_tokens // cache.page_size
    return min(max(wanted, of_sequence), num_pages)


def resolve_num_pages(
    cache: CacheConfig, limits: RankLimits, page_bytes: PageBytes, auto_bytes: int, most_bytes: int
) -> int:
    """Returns the pages of the KV cache; with `auto` no more than max_seqs sequences of max_context need.

    auto_bytes: memory for `auto`. most_bytes: memory for a given number.
    Raises ModelError, which names cache.num_tokens and a value that fits.
    """
    if cache.num_tokens == "auto":
        of_sequence = -(-limits.max_context // cache.page_size)
        num_pages = min(page_bytes.count_fitting(cache, limits, auto_bytes), limits.max_seqs * of_sequence)
        if num_pages < 1:
            raise ModelError(
                "cache.num_tokens=auto: no memory is left for one page; use a smaller model or cache.page_size"
            )
        return num_pages
    num_pages = cache.num_tokens // cache.page_size
    if num_pages < 1:
        raise ModelError(
            f"cache.num_tokens={cache.num_tokens}: less than a page; use at least cache.page_size ({cache.page_size})"
        )
    most_pages = page_bytes.count_fitting(cache, limits, most_bytes)
    if num_pages > most_pages:
        raise ModelError(
            f"cache.num_tokens={cache.num_tokens}: takes {page_bytes.count(cache, limits, num_pages) >> 20} MiB where "
            f"{max(most_bytes, 0) >> 20} MiB are free; use at most {most_pages * cache.page_size}, or auto"
        )
    return num_pages
