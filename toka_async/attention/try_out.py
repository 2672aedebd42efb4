"""Runs attention's parts on synthetic batches, so that what they compile at first use is there, and works."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from toka_async.attention.base import AttentionBatch, PrefixGroup
from toka_async.attention.kv_cache import KVCache

if TYPE_CHECKING:  # these need Triton, which is not everywhere
    from toka_async.attention.paged import DecodeKernel, PrefillKernel

LONG_TOKENS = 4096  # tokens of a row that several programs share
MIDDLE_TOKENS = 640  # tokens of a row that one program reads if there are many rows
SPLIT_TOKENS = 300  # tokens of a short row that several programs share


@dataclass(slots=True, frozen=True)
class TrialShape:
    """A batch to try or to measure: (context, queries) of each row, decoding rows first."""

    rows: Sequence[tuple[int, int]]
    num_decode: int
    groups: tuple[PrefixGroup, ...] = ()


def make_batch(cache: KVCache, shape: TrialShape, alike: Sequence[PrefixGroup] = ()) -> AttentionBatch:
    """Makes a batch over random pages. All rows of a group of `alike` share their first pages."""
    device = cache.device
    contexts, queries = np.asarray(shape.rows, dtype=np.int32).T.copy()
    width = -(-int(contexts.max()) // cache.page_size)
    pages = np.random.default_rng(0).integers(cache.num_pages, size=(len(contexts), width), dtype=np.int32)
    for group in alike:
        rows = slice(group.first_row, group.first_row + group.num_rows)
        pages[rows, : group.num_pages] = pages[group.first_row, : group.num_pages]
    return AttentionBatch(
        num_decode=shape.num_decode,
        query_lengths=queries,
        context_lengths=contexts,
        contexts=torch.from_numpy(contexts).to(device),
        slots=torch.arange(len(contexts), device=device),
        page_table=torch.from_numpy(pages).to(device),
        write_indices=torch.empty(0, dtype=torch.int64, device=device),
        groups=shape.groups,
    )


def try_decode(
    cache: KVCache, num_heads: int, part: DecodeKernel, max_seqs: int, window: int = 0, sinks: Tensor | None = None
) -> None:
    """Runs a part at shapes that take each of its paths. sinks: if layers have them.

    Paths: keys of a row read by one or several programs, few keys and many; no groups, one group, as many as fill the
    chip.
    """
    device = cache.device
    num_processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    full = num_processors // cache.num_kv_heads + 1
    for num_groups in (0, 1, full):
        groups = tuple(PrefixGroup(2 * i, 2, 1) for i in range(num_groups))
        few = 2 * max(1, num_groups)
        many = max(few, min(max_seqs, 64 * full))  # or the most: none of them needs several programs
        short, long = _choose_contexts(cache, window)
        for num_rows, context in ((few, short), (few, long), (few, SPLIT_TOKENS), (many, min(MIDDLE_TOKENS, long))):
            _try(cache, num_heads, part, TrialShape(((context, 1),) * num_rows, num_rows, groups), window, sinks)
    _wait(device)


def _try(
    cache: KVCache, num_heads: int, part: DecodeKernel, shape: TrialShape, window: int, sinks: Tensor | None
) -> None:
    query = cache.make_zero_queries(shape.num_decode, num_heads)
    part.plan(make_batch(cache, shape, shape.groups), shape.groups, window)
    part.run(0, query, torch.empty_like(query), sinks)


def try_chunks(
    cache: KVCache, num_heads: int, part: PrefillKernel, window: int = 0, sinks: Tensor | None = None
) -> None:
    """Runs a part at short contexts, and at a long one beside a short one, which several programs share."""
    query = cache.make_zero_queries(2, num_heads)
    short = cache.page_size + 1
    for context in (short, short + LONG_TOKENS):
        part.plan(make_batch(cache, TrialShape(((context, 1), (short, 1)), 0)), window)
        part.run(0, query, torch.empty_like(query), sinks)
    _wait(cache.device)


def _choose_contexts(cache: KVCache, window: int) -> tuple[int, int]:
    """Chooses a short and a long context, of a page and some tokens more, within the window if possible."""
    short, long = cache.page_size + 1, cache.page_size + LONG_TOKENS
    return short, min(long, max(window, short)) if window else long


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
