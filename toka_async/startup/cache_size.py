"""Computes how much of a GPU's memory is left for the KV cache beside the weights and the largest step.

Knows the model's shape and the limits; the caller measures what a step really needs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from toka_async.attention.kv_cache import bytes_per_token
from toka_async.checkpoint.limits import PageBytes, RankLimits, resolve_num_snapshots
from toka_async.checkpoint.spec import ModelError, ModelSpec
from toka_async.config import CacheConfig, GraphsConfig, ScheduleConfig
from toka_async.model.activation_layout import LayoutPolicy
from toka_async.model.overlap import OverlappedShards
from toka_async.runner.graphs import DENSE_ROWS
from toka_async.runner.micro_batches import count_most_rows, count_most_tokens
from toka_async.runner.slab_sampler import SLAB_BYTES
from toka_async.startup.device import resolve_stored_dtype
from toka_async.startup.memory import read_free_cuda_memory

_HISTORY_BYTES = 4  # of a token's id
LINKED = 4  # residuals of a token that a stage holds beside its own: two that come, two that go
# Bytes beside what steps and graphs allocate: graphs' nodes, libraries' workspaces, waste in the allocator's blocks.
_SPARE_SHARE = 0.02
_SPARE_BYTES = 1 << 30
_GRAPH_SHARE = 0.02  # of a GPU's memory, which steps with prompts may take in graphs, and decoding steps as well
_MOST_GRAPH_TOKENS = 4096
_MOST_GRAPH_ROWS = 4096


def count_page_bytes(spec: ModelSpec, cache: CacheConfig, dtype: torch.dtype, window: int = 0) -> PageBytes:
    """Counts the bytes of a page over all layers. dtype: that the model computes in.

    window: the largest one of all ranks' layers; this rank's may have none.
    """
    stored = resolve_stored_dtype(cache, dtype)
    of_windows = sum(each.cached_values for each in spec.attentions if each.window) * stored.itemsize
    of_others = bytes_per_token(spec, stored) - of_windows + _HISTORY_BYTES
    return PageBytes(cache.page_size * of_others, cache.page_size * of_windows, window or spec.window)


def count_largest_step_pages(limits: RankLimits, page_size: int, most: int = 2**31) -> int:
    """Counts the pages for a step of the most rows and tokens, plus a token of each row; `most` if rows share pages."""
    return max(1, min(limits.max_seqs * 2 + -(-limits.max_tokens // page_size), most))


def count_trial_pages(limits: RankLimits, cache: CacheConfig, page_bytes: PageBytes, device: torch.device) -> int:
    """Counts pages for a trial of the largest step that leave most of the memory to the step."""
    room = read_free_cuda_memory(device, cache.memory_fraction) // 8
    return count_largest_step_pages(limits, cache.page_size, page_bytes.count_fitting(cache, limits, room))


def make_misfit_error(limits: RankLimits) -> ModelError:
    """Makes the error for a largest step that ran out of memory."""
    seqs, tokens = limits.max_seqs, limits.max_tokens
    return ModelError(
        f"schedule.max_seqs={seqs}, schedule.max_tokens={tokens}: the largest step does not fit the GPU's memory; try "
        f"{max(1, seqs // 2)} and {max(1, tokens // 2)}"
    )


def compute_cache_memory(device: torch.device, fraction: float, peak: int) -> int:
    """Computes the bytes that the cache may take if weights and the largest step take `peak` of torch's memory."""
    reserved = torch.cuda.memory_reserved(device)
    total = torch.cuda.get_device_properties(device).total_memory
    return read_free_cuda_memory(device, fraction) + reserved - peak - compute_spare_bytes(total)


def compute_spare_bytes(total: int) -> int:
    """Computes the part of a GPU's `total` bytes that weights, the largest step and the cache do not get."""
    return int(_SPARE_SHARE * total) + _SPARE_BYTES


def check_largest_step(
    spec: ModelSpec,
    limits: RankLimits,
    dtype: torch.dtype,
    cache: CacheConfig,
    device: torch.device,
    shares: MemoryShares,
    num_parts: int = 1,
) -> None:
    """Refuses limits whose states or largest step cannot fit in their share of the memory, before they are tried.

    num_parts: micro-batches of a step.
    Raises ModelError that names the setting that takes more, and one that fits.
    """
    left = read_free_cuda_memory(device, cache.memory_fraction) - _count_slab_bytes(spec, limits)
    check_states(spec, limits, cache, dtype, int(shares.states * left))
    free = int(shares.step * (left - count_states_bytes(spec, limits, cache, dtype)))
    token = count_token_bytes(spec, dtype, num_parts, resolve_stored_dtype(cache, dtype))
    row = count_row_bytes(spec, limits, dtype, cache.page_size, num_parts)
    needed = limits.max_tokens * token + limits.max_seqs * row
    if needed <= free:
        return
    fits = _propose_fitting(limits, token, row, free)
    now = {"schedule.max_seqs": limits.max_seqs, "schedule.max_tokens": limits.max_tokens}
    settings = ", ".join(f"{name}={value}" for name, value in now.items() if name in fits or not fits)
    advice = " and ".join(map(str, fits.values()))
    raise ModelError(
        f"{settings}: the largest step takes about {needed >> 20} MiB where {max(free, 0) >> 20} MiB are free; "
        + (f"use at most {advice}" if fits else "use a smaller model, or raise cache.memory_fraction")
    )


def count_states_bytes(spec: ModelSpec, limits: RankLimits, cache: CacheConfig, dtype: torch.dtype) -> int:
    """Counts the bytes of all recurrent states, see `StateCache`: of rows, of padding, and snapshots."""
    num_states = limits.max_seqs + 1 + resolve_num_snapshots(cache, spec, limits.max_seqs)
    return num_states * spec.count_state_bytes(dtype.itemsize)


def check_states(spec: ModelSpec, limits: RankLimits, cache: CacheConfig, dtype: torch.dtype, free: int) -> None:
    """Raises ModelError if recurrent states take more bytes than are free for them."""

    def count(max_seqs: int) -> int:
        return count_states_bytes(spec, replace(limits, max_seqs=max_seqs), cache, dtype)

    needed, free = count(limits.max_seqs), max(free, 0)
    if needed <= free:
        return
    fits = bisect_right(range(1, limits.max_seqs), free, key=count)
    raise ModelError(
        f"schedule.max_seqs={limits.max_seqs}: the states of recurrent layers, with snapshots (cache.num_snapshots), "
        f"take {needed >> 20} MiB, {spec.count_state_bytes(dtype.itemsize) >> 20} MiB each, where {free >> 20} MiB are "
        f"free; " + (f"use at most {fits}" if fits else "use a smaller model, or raise cache.memory_fraction")
    )


@dataclass(slots=True, frozen=True)
class MemoryShares:
    """The most that recurrent states may take of the memory beside the weights, and the largest step of the rest.

    What is automatic leaves half of the memory.
    """

    states: float = 1.0
    step: float = 1.0


def choose_shares(schedule: ScheduleConfig) -> MemoryShares:
    is_auto = "auto" in (schedule.max_seqs, schedule.max_tokens)
    return MemoryShares(0.5 if schedule.max_seqs == "auto" else 1.0, 0.5 if is_auto else 1.0)


def fit_limits(
    limits: RankLimits, schedule: ScheduleConfig, check: Callable[[RankLimits], None], row: int, token: int
) -> RankLimits:
    """Lowers the limits that are `auto`, first the one that takes more memory, until `check` accepts them.

    row, token: bytes of each in a step. So a model whose rows have large states keeps its large chunks of prompts.
    Raises ModelError when `check` does not accept what was asked for, or the smallest.
    """
    while True:
        try:
            check(limits)
        except ModelError:
            seqs, tokens = limits.max_seqs, limits.max_tokens
            lowers_seqs, lowers_tokens = schedule.max_seqs == "auto", schedule.max_tokens == "auto"
            if lowers_seqs and lowers_tokens:
                lowers_seqs = seqs * row > tokens * token or tokens == seqs
                lowers_tokens = not lowers_seqs
            seqs = _lower(seqs) if lowers_seqs else seqs
            smaller = replace(limits, max_seqs=seqs, max_tokens=max(seqs, _lower(tokens) if lowers_tokens else tokens))
            if smaller == limits or seqs < 1:
                raise
            limits = smaller
        else:
            return limits


def _lower(count: int) -> int:
    """Returns the next smaller number of 1, 2, 3, 4, 6, 8, 12, 16, 24 ..."""
    if count < 2:
        return 0
    power = 1 << ((count - 1).bit_length() - 1)
    between = 3 * power // 2
    return between if between < count else power


def _propose_fitting(limits: RankLimits, token: int, row: int, free: int) -> dict[str, int]:
    """Proposes settings with which the largest step fits: less of what takes more, otherwise less of both."""
    seqs, tokens = limits.max_seqs, limits.max_tokens
    if seqs * row > tokens * token:
        fewer = min(seqs // 2, (free - tokens * token) // row)
        if fewer >= 1:
            return {"schedule.max_seqs": fewer}
    else:
        fewer = min(tokens // 2, (free - seqs * row) // token)
        if fewer >= seqs:  # each has a token of a step
            return {"schedule.max_tokens": fewer}
    share = max(free, 0) / (seqs * row + tokens * token)
    both = {"schedule.max_seqs": int(seqs * share), "schedule.max_tokens": int(tokens * share)}
    return both if both["schedule.max_seqs"] else {}


def _count_slab_bytes(spec: ModelSpec, limits: RankLimits) -> int:
    """Counts the bytes that plain torch needs at once to sample, logits included."""
    return 12 * min(SLAB_BYTES["cuda"], limits.max_tokens * spec.vocab_size * 4)


def count_token_bytes(
    spec: ModelSpec, dtype: torch.dtype, num_parts: int = 1, stored: torch.dtype | None = None
) -> int:
    """Counts a token's bytes in a step: a layer's widest moment (residual, norm, feed) and its keys.

    In a step of several parts, the moment is that of one part's tokens, whose residuals come and go as well. stored:
    what keys are stored as; None: dtype.
    """
    of_mixer = max(layer.mixer.count_values() for layer in spec.layers)
    of_feed = max(layer.feed.count_values(spec.hidden_size) for layer in spec.layers)
    a_token = 4 * spec.passed_size + of_feed + of_mixer
    if num_parts > 1:
        a_token = -(-(a_token + LINKED * spec.passed_size) // num_parts)
    return a_token * dtype.itemsize + bytes_per_token(spec, stored or dtype)


def count_graph_bytes(spec: ModelSpec, dtype: torch.dtype, num_rows: int, num_tokens: int) -> int:
    """Counts the bytes in which all graphs compute, beside those of other steps.

    num_rows: of the largest decoding step. num_tokens: of the largest step with prompts, whose logits are not captured.
    """
    a_token = count_token_bytes(spec, dtype) - bytes_per_token(spec, dtype)
    return num_rows * (a_token + spec.count_logit_bytes(dtype.itemsize)) + num_tokens * a_token


def count_graph_tokens(graphs: GraphsConfig, spec: ModelSpec, dtype: torch.dtype, total: int, max_tokens: int) -> int:
    """Counts the tokens of the largest captured step with prompts on a GPU of `total` bytes; 0: none is captured.

    max_tokens: of a step. A step of more than are chosen takes the device longer than the host, mostly, so that a graph
    would save nothing.
    """
    if not graphs.enabled:
        return 0
    if graphs.max_tokens != "auto":
        return min(graphs.max_tokens, max_tokens)
    return min(_MOST_GRAPH_TOKENS, int(_GRAPH_SHARE * total) // count_graph_bytes(spec, dtype, 0, 1), max_tokens)


def count_graph_rows(graphs: GraphsConfig, spec: ModelSpec, dtype: torch.dtype, total: int, max_seqs: int) -> int:
    """Counts the rows of the largest decoding step that may be captured on a GPU of `total` bytes; 0: none is.

    max_seqs: of a step. Of automatic sizes above DENSE_ROWS, a start captures those that pay.
    """
    if not graphs.enabled:
        return 0
    if graphs.max_rows != "auto":
        return min(graphs.max_rows, max_seqs)
    most = int(_GRAPH_SHARE * total) // count_graph_bytes(spec, dtype, 1, 0)
    return min(_MOST_GRAPH_ROWS, max(DENSE_ROWS, most), max_seqs)


def count_row_bytes(spec: ModelSpec, limits: RankLimits, dtype: torch.dtype, page_size: int, num_parts: int = 1) -> int:
    """Counts the bytes of a row: its logits, its lines in page tables, its sampling parameters."""
    logits = -(-spec.count_logit_bytes(dtype.itemsize) // num_parts)
    num_tables = 2 if spec.window else 1
    return logits + spec.vocab_size // 4 + num_tables * 4 * limits.max_context // page_size


def limit_part(limits: RankLimits, num_parts: int) -> RankLimits:
    """Returns the limits of each of a step's micro-batches."""
    num_tokens = count_most_tokens(limits.max_seqs, limits.max_tokens, num_parts)
    return replace(limits, max_seqs=count_most_rows(limits.max_seqs, num_parts), max_tokens=num_tokens)


def limit_separate(limits: RankLimits, layouts: LayoutPolicy) -> RankLimits:
    """Returns the limits of products that do not overlap with exchanges; those of sampled tokens never do."""
    if not isinstance(layouts.shards, OverlappedShards):
        return limits
    return replace(limits, max_tokens=min(limits.max_tokens, max(limits.max_seqs, layouts.min_tokens - 1)))
