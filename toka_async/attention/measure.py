"""Times parts on the chip at a handful of shapes, and makes the table that chooses between them.

A part is timed as a step uses it: planned once on the host, run once for each layer. Pages are random, what is in them
does not matter, and nothing is written to the cache. Knows parts by name only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from toka_async.attention.base import AttentionBatch, PrefixGroup
from toka_async.attention.choice import MARGIN, ChoiceTable, MeasuredShape, only, smallest_groups
from toka_async.attention.kv_cache import KVCache

if TYPE_CHECKING:  # these need Triton, which is not everywhere
    from toka_async.attention.paged import DecodeKernel, PrefillKernel

ROWS = (1, 16, 128, 1024, 8192)
CONTEXTS = (128, 1024, 8192, 32768)
CHUNKS = (
    *((1, 512, 0), (1, 4096, 0), (8, 512, 0), (8, 1024, 0), (16, 1024, 0), (32, 1024, 0)),
    *((1, 512, 8192), (32, 256, 1024), (128, 64, 1024)),
)
GROUP_ROWS = (4, 8, 16, 64, 512)
GROUP_TOKENS = (64, 256, 512, 1024, 4096)
GROUPED_ROWS = 4096  # of all groups together
OWN_TOKENS = 64  # of a grouped row
LONG_TOKENS = 4096  # of a row that several programs share
MIDDLE_TOKENS = 640  # of a row that one program reads where there are many
UNEVEN_ROWS = 200  # whose parts are merged one after the other, as there are rows enough to fill the chip
SPLIT_TOKENS = 300  # of a row that several programs share, short as it is
MOST_TOKENS = 1 << 22  # of all rows of a measured batch: some milliseconds to read
LARGEST = 1 << 30  # rows or tokens of any shape
_ROUNDS = 3
_REPEATS = 3  # of a run in each


class Clock(Protocol):
    def __call__(self, plan: Callable[[], None], run: Callable[[], None]) -> float:
        """Seconds that a step takes: one plan, and a run for each layer."""
        ...


@dataclass(slots=True, frozen=True)
class CudaClock:
    """Host time of planning and device time of running, the least of some rounds: what else is at work only adds.

    The first round, which may compile, is not counted.
    """

    num_layers: int

    def __call__(self, plan: Callable[[], None], run: Callable[[], None]) -> float:
        plan()
        run()
        rounds = [_round(plan, run) for _ in range(_ROUNDS)]
        return min(planned for planned, _ in rounds) + self.num_layers * min(ran for _, ran in rounds)


def _round(plan: Callable[[], None], run: Callable[[], None]) -> tuple[float, float]:
    """Seconds of a plan on the host, and of a run on the device."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    plan()
    planned = time.perf_counter() - begin
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    first.record()
    for _ in range(_REPEATS):
        run()
    last.record()
    last.synchronize()
    return planned, float(first.elapsed_time(last)) / 1000 / _REPEATS


@dataclass(slots=True, frozen=True)
class TrialShape:
    """A batch to measure: (context, queries) of each row, decoding rows first."""

    rows: Sequence[tuple[int, int]]
    num_decode: int
    groups: tuple[PrefixGroup, ...] = ()


@dataclass(slots=True, frozen=True)
class Bench:
    """The parts to choose from, by name, the cache that they read, and the limits of a step."""

    cache: KVCache
    num_heads: int
    max_seqs: int
    max_tokens: int
    decode: Mapping[str, DecodeKernel]
    chunks: Mapping[str, PrefillKernel]
    clock: Clock

    def table(self) -> ChoiceTable:
        """Measures; a single part is measured for its groups alone."""
        grouped, groups = self._groups()
        table = only(next(iter(self.decode)), groups)
        if len(self.decode) == 1 and len(self.chunks) == 1:
            return table
        return ChoiceTable(
            decode=self._decode_points() or table.decode,
            grouped=grouped or table.grouped,
            chunks=self._chunk_points() or table.chunks,
            groups=groups,
        )

    def facts(self) -> dict[str, object]:
        """What the table depends on, but for the chip, in terms of JSON."""
        cache = self.cache
        return {
            "heads": [self.num_heads, cache.num_kv_heads, cache.head_dim],
            "layers": len(cache.keys),
            "page_size": cache.page_size,
            "dtype": str(cache.keys[0].dtype),
            "parts": [list(self.decode), list(self.chunks)],
            "shapes": [self._decode_shapes(), self._chunk_shapes(), self._group_shapes()],
        }

    def admits(self, table: ChoiceTable) -> bool:
        """Whether a table from elsewhere can be chosen by: it names parts that there are, at shapes that can be."""
        decode, chunks = (*table.decode, *table.grouped), table.chunks
        return (
            bool(table.decode and table.grouped and table.chunks)
            and {point.choice for point in decode} <= set(self.decode)
            and {point.choice for point in chunks} <= set(self.chunks)
            and all(0 < number <= LARGEST for point in (*decode, *chunks) for number in (point.size, point.tokens))
            and set(table.groups) <= {(rows, tokens) for rows, tokens, _ in self._group_shapes()}
        )

    def _decode_points(self) -> tuple[MeasuredShape, ...]:
        return tuple(
            MeasuredShape(rows, context, _fastest(self._decode_times(TrialShape(((context, 1),) * rows, rows))))
            for rows, context in self._decode_shapes()
        )

    def _decode_shapes(self) -> list[tuple[int, int]]:
        """Rows and context of each."""
        most_tokens = min(MOST_TOKENS, self.cache.num_pages * self.cache.page_size)
        return [
            (rows, context)
            for rows in ROWS
            for context in CONTEXTS
            if rows <= self.max_seqs and rows * context <= most_tokens
        ]

    def _chunk_points(self) -> tuple[MeasuredShape, ...]:
        return tuple(
            MeasuredShape(rows * length, before + length, _fastest(self._chunk_times(rows, length, before)))
            for rows, length, before in self._chunk_shapes()
        )

    def _chunk_shapes(self) -> list[tuple[int, int, int]]:
        """Rows, tokens of a row's chunk and before it."""
        most_tokens = self.cache.num_pages * self.cache.page_size
        return [
            (rows, length, before)
            for rows, length, before in CHUNKS
            if rows <= self.max_seqs and rows * length <= self.max_tokens and rows * (before + length) <= most_tokens
        ]

    def _groups(self) -> tuple[tuple[MeasuredShape, ...], tuple[tuple[int, int], ...]]:
        """The fastest part with groups, and which groups are faster than the fastest part without."""
        points: list[MeasuredShape] = []
        worth: dict[tuple[int, int], bool] = {}
        for num_rows, num_tokens, num_groups in self._group_shapes():
            num_pages = self._pages_of(num_tokens)
            groups = tuple(PrefixGroup(i * num_rows, num_rows, num_pages) for i in range(num_groups))
            num_decode = num_rows * num_groups
            rows = ((num_pages * self.cache.page_size + OWN_TOKENS, 1),) * num_decode
            shared = self._decode_times(TrialShape(rows, num_decode, groups))
            alone = self._decode_times(TrialShape(rows, num_decode), groups)
            points.append(MeasuredShape(num_rows, num_tokens, _fastest(shared)))
            worth[num_rows, num_tokens] = min(shared.values()) < MARGIN * min(alone.values())
        return tuple(points), smallest_groups(worth)

    def _group_shapes(self) -> list[tuple[int, int, int]]:
        """Rows of a group, tokens of its prefix, and groups: as many as a full step has, if the cache holds one."""
        shapes = []
        for num_rows in GROUP_ROWS:
            for num_tokens in GROUP_TOKENS:
                context = self._pages_of(num_tokens) * self.cache.page_size + OWN_TOKENS
                num_groups = min(self.max_seqs, GROUPED_ROWS, MOST_TOKENS // context) // num_rows
                if num_groups and context <= self.cache.num_pages * self.cache.page_size:
                    shapes.append((num_rows, num_tokens, num_groups))
        return shapes

    def _pages_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.cache.page_size)

    def _decode_times(self, shape: TrialShape, alike: tuple[PrefixGroup, ...] = ()) -> dict[str, float]:
        """Seconds of each part; rows of `alike` share pages, too, but the parts are not told."""
        batch = synthetic(self.cache, shape, shape.groups or alike)
        query = self._queries(shape.num_decode)
        output = torch.empty_like(query)
        return {
            name: self.clock(partial(part.plan, batch, shape.groups, 0), partial(part.run, 0, query, output))
            for name, part in self.decode.items()
        }

    def _chunk_times(self, num_rows: int, length: int, before: int) -> dict[str, float]:
        batch = synthetic(self.cache, TrialShape(((before + length, length),) * num_rows, 0))
        query = self._queries(num_rows * length)
        output = torch.empty_like(query)
        return {
            name: self.clock(partial(part.plan, batch, 0), partial(part.run, 0, query, output))
            for name, part in self.chunks.items()
        }

    def _queries(self, num_tokens: int) -> Tensor:
        keys = self.cache.keys[0]
        return torch.randn((num_tokens, self.num_heads, self.cache.head_dim), device=keys.device).to(keys.dtype)


def synthetic(cache: KVCache, shape: TrialShape, alike: Sequence[PrefixGroup] = ()) -> AttentionBatch:
    """A batch over random pages, the first of which are the same in all rows of a group of `alike`."""
    device = cache.keys[0].device
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


def try_decode(cache: KVCache, num_heads: int, part: DecodeKernel, max_seqs: int, window: int = 0) -> None:
    """Runs a part at shapes that take each of its paths, so that what it compiles at first use is there, and works.

    Paths: keys of a row read by one or several programs, few keys and many, no groups, one group, as many as fill the
    chip; many rows, one of which is read by several programs.
    """
    device = cache.keys[0].device
    num_processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    full = num_processors // cache.num_kv_heads + 1
    for num_groups in (0, 1, full):
        groups = tuple(PrefixGroup(2 * i, 2, 1) for i in range(num_groups))
        few = 2 * max(1, num_groups)
        many = max(few, min(max_seqs, 32 * full))  # or all there can be: none of them needs several programs
        short, long = _contexts(cache, window)
        for num_rows, context in ((few, short), (few, long), (few, SPLIT_TOKENS), (many, min(MIDDLE_TOKENS, long))):
            _try(cache, num_heads, part, TrialShape(((context, 1),) * num_rows, num_rows, groups), window)
    short, long = _contexts(cache, window)
    num_rows = min(max_seqs, UNEVEN_ROWS)
    _try(cache, num_heads, part, TrialShape(((long, 1), *((short, 1),) * (num_rows - 1)), num_rows), window)
    _wait(device)


def _try(cache: KVCache, num_heads: int, part: DecodeKernel, shape: TrialShape, window: int) -> None:
    query = _zeros(cache, shape.num_decode, num_heads)
    part.plan(synthetic(cache, shape, shape.groups), shape.groups, window)
    part.run(0, query, torch.empty_like(query))


def try_chunks(cache: KVCache, num_heads: int, part: PrefillKernel, window: int = 0) -> None:
    """The same for chunks."""
    query = _zeros(cache, 2, num_heads)
    for context in _contexts(cache, window):
        part.plan(synthetic(cache, TrialShape(((context, 1),) * 2, 0)), window)
        part.run(0, query, torch.empty_like(query))
    _wait(cache.keys[0].device)


def _contexts(cache: KVCache, window: int) -> tuple[int, int]:
    """A short and a long one, of a page and some tokens more, and within the window if they can be."""
    short, long = cache.page_size + 1, cache.page_size + LONG_TOKENS
    return short, min(long, max(window, short)) if window else long


def _zeros(cache: KVCache, num_tokens: int, num_heads: int) -> Tensor:
    keys = cache.keys[0]
    return torch.zeros((num_tokens, num_heads, cache.head_dim), dtype=keys.dtype, device=keys.device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _fastest(times: Mapping[str, float]) -> str:
    """The first that is as fast as the fastest, but for chance."""
    best = min(times.values())
    return next(name for name, seconds in times.items() if seconds * MARGIN <= best)
